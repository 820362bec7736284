"""RunnerAdapters: the adapters of a runner, read from files while steps run."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from runtime.base.types import CallboardError
from runtime.kernels.operations import ADD_ADAPTERS
from runtime.loading.adapter_files import AdaptedMap, TensorPlace, read_adapter
from runtime.models.decoder import Decoder
from runtime.models.lora import (
    DecoderAdapters,
    Matrices,
    check_map_part,
    make_decoder_adapters,
    map_parts_of,
    write_adapter,
)
from runtime.models.weight_map import WeightMap, short_name
from runtime.worker.extras import RunnerParts

logger = logging.getLogger(__name__)

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class RunnerAdapters:
    """Room for `max_loras` adapters next to a decoder's weights. One thread at a time loads while steps run: their rows
    never have the index that is being written (features/adapter_table.py)."""

    def __init__(self, decoder: Decoder, weight_map: WeightMap, max_loras: int, max_rank: int) -> None:
        self._decoder, self._weight_map, self._max_loras, self._max_rank = decoder, weight_map, max_loras, max_rank
        self._adapters: DecoderAdapters | None = None
        if max_loras:
            add = decoder.kernels[ADD_ADAPTERS]
            self._adapters = make_decoder_adapters(decoder.spec, decoder.numerics, add, max_loras, max_rank)
            decoder.adapters = self._adapters
        self._on_gpu = decoder.numerics.device.type == "cuda"
        # Copies and steps do not wait for each other.
        self._stream = torch.cuda.Stream(decoder.numerics.device) if self._on_gpu else None

    @classmethod
    def of(cls, parts: RunnerParts) -> RunnerAdapters:
        """For a runner's model and its settings `max_loras` and `max_lora_rank`."""
        return cls(parts.decoder, parts.source.weight_map, parts.config.max_loras, parts.config.max_lora_rank)

    @torch.inference_mode()
    def load(self, index: int, path: str, digest: str = "") -> None:
        """Load the adapter in a folder at an index, from 1.

        Raises CallboardError, before anything has changed, if the adapter is damaged or not supported, or belongs to
        another model or digest."""
        start, spec = time.perf_counter(), self._decoder.spec
        if not 1 <= index <= self._max_loras:
            raise CallboardError(f"There is room for adapters 1 to {self._max_loras} (max_loras), not for {index}.")
        assert self._adapters is not None
        adapter = read_adapter(path)
        adapter.check_rank(self._max_rank)
        places, found = map_parts_of(spec, self._weight_map), {}
        maps = {name: one for name, one in adapter.maps.items() if not self._weight_map.is_ignored(name)}
        maps = maps or dict(adapter.maps)  # an adapter for images alone is refused below
        if num_left_out := len(adapter.maps) - len(maps):
            logger.info("adapter %d: %d maps of parts that texts do not need are left out", index, num_left_out)
        for module, one in maps.items():
            place = places.get(short_name(module))
            found[check_map_part(place, module, (one.size_out, one.size_in), spec)] = one
        data = adapter.read(digest)
        with self._copying():
            matrices = {place: partial(_matrices, data, one) for place, one in found.items()}
            write_adapter(self._adapters.layers, spec, index, matrices)
        logger.info("adapter %d: %s (rank %d) read in %.2f s", index, path, adapter.rank, time.perf_counter() - start)

    def _copying(self) -> Any:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


def _matrices(data: bytearray, one: AdaptedMap) -> Matrices:
    """One map's A and scaled B, from the file's bytes."""
    return _tensor(data, one.a), _tensor(data, one.b).float() * one.scale


def _tensor(data: bytearray, place: TensorPlace) -> torch.Tensor:
    count = place.rows * place.columns
    flat = torch.frombuffer(data, dtype=_DTYPES[place.dtype], count=count, offset=place.offset)
    return flat.view(place.rows, place.columns)
