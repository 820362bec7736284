"""A runner's start without a GPU: it records the kernels of all steps before the first request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.kv_cache_spec import KVCacheSpec
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.sharding import Part, parts_of
from runtime.base.shard import ALONE, Shard
from runtime.compilation.pretended_gpu import GpuFacts, pretended_gpu
from runtime.compilation.triton_cache import Compilation, recorded_launches
from runtime.kernels.collectives.communicator import Communicator
from runtime.kernels.numerics import Numerics
from runtime.models.decoder import Decoder, Layer
from runtime.models.decoder_build import LayerBuilder, build_decoder
from runtime.models.linear_maps import LinearMaps
from runtime.models.weight_map import WeightMap
from runtime.models.weights import _IN_FLOAT32
from runtime.quant.held_weight import HeldWeight
from runtime.quant.model_formats import weight_formats
from runtime.worker.memory import planned_cache
from runtime.worker.sources import DummySource


class _Nothing:
    """Parts of a layer that do nothing."""

    def __getattr__(self, name: str) -> _Nothing:
        return self

    def __call__(self, *args: Any) -> None:
        return None


class _DistinctLayers(LayerBuilder):
    """Builds the first of several equal layers; the others launch nothing."""

    def __init__(self, maps: LinearMaps, num_positions: int, cache: KVCacheSpec) -> None:
        super().__init__(maps, num_positions)
        self._cache, self._built = cache, set[Any]()

    def layer(self, index: int) -> Layer:
        prefix, shapes = f"layers.{index}.", self.spec.shapes()
        formats = tuple(str(self.maps.format_of(name).name) for name in shapes if name.startswith(prefix))
        group = self._cache.place_of(index)[0]
        kind = self.spec.layers[index], formats, group
        if kind in self._built:
            nothing: Any = _Nothing()
            return Layer(None, None, nothing, torch.empty(0), None, nothing)
        self._built.add(kind)
        return super().layer(index)


class SpecSource(DummySource):
    config: EngineConfig

    def load(self, spec: DecoderSpec, numerics: Numerics, max_model_len: int, communicator: Communicator) -> Decoder:
        shapes, format_of = spec.whole.shapes(), weight_formats(spec, numerics)

        def read(parameter: str, part: Part | None = None) -> HeldWeight:
            weight_format, parts = format_of(parameter), parts_of(spec, parameter) if part is None else (part,)
            is_wide = self.weight_map.adds_one(parameter) or parameter.endswith(_IN_FLOAT32)
            dtype = torch.float32 if is_wide else numerics.dtype
            drawn = weight_format.random(shapes[parameter], torch.Generator())
            if drawn is not None:
                tensors = weight_format.parts_of_random(drawn, parts, numerics)
            else:
                tensors = weight_format.encode(torch.empty(shapes[parameter], dtype=dtype, device=numerics.device), parts)
            return HeldWeight((parameter,), weight_format, tensors)

        builder = partial(_DistinctLayers, cache=planned_cache(self.config, spec, numerics))
        return build_decoder(spec, numerics, max_model_len, read, communicator, builder)


def kernels_of(config, source, facts, shard=None, is_draft=False):
    SpecSource.config = config
    with recorded_launches(facts.capability) as found, pretended_gpu(facts):
        build_runner(config, source, shard, is_draft)
    return found
