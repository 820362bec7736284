"""SpecSource: a model's description without its weights. Tensors have shapes alone, and equal layers are built once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runtime.base.config import MTP, EngineConfig
from runtime.base.kv_cache_spec import KVCacheSpec
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.head_spec import HeadSpec
from runtime.base.model.pooling import Pooling
from runtime.base.model.sharding import Part, parts_of
from runtime.kernels.collectives.communicator import Communicator
from runtime.kernels.numerics import Numerics
from runtime.loading.folder import folder_eos_token_ids, model_config
from runtime.models import load_spec
from runtime.models.decoder import Decoder, Layer
from runtime.models.decoder_build import LayerBuilder, build_decoder
from runtime.models.heads.build import DrawnHead
from runtime.models.heads.find import stated_head
from runtime.models.linear_maps import LinearMaps
from runtime.models.towers.specs import tower_spec
from runtime.models.weights import is_wide
from runtime.quant.held_weight import HeldWeight
from runtime.quant.model_formats import weight_formats
from runtime.worker.memory import planned_cache
from runtime.worker.sources import CheckpointSource, DummySource, ModelSource, folder_head_of


@dataclass(frozen=True, slots=True)
class SpecSource(DummySource):
    """What chooses a model's kernels."""

    config: EngineConfig = field(default_factory=EngineConfig)
    pooled: Pooling | None = None
    has_kv_scales: bool = False

    @classmethod
    def of(cls, source: ModelSource, config: EngineConfig, head: HeadSpec | None) -> SpecSource:
        """The description of another source, with a head; its weights are not read."""
        is_fp8 = source.spec.kv_cache_form(config.kv_cache_dtype) == "fp8"
        pooling = source.pooling(config.pooling)
        return cls(
            source.spec,
            eos_token_ids=source.eos_token_ids,
            num_labels=0 if pooling is None else pooling.num_labels,
            weight_map=source.weight_map,
            tower=source.tower,
            draft_head=head,
            config=config,
            pooled=pooling,
            has_kv_scales=is_fp8 and source.kv_scales() is not None,
        )

    @classmethod
    def at(cls, path: Path, config: EngineConfig) -> SpecSource:
        """Describe a model's files, or a folder with a config.json alone. A head in another folder needs its files."""
        if path.is_file() or any(path.glob("*.safetensors")):
            source = CheckpointSource(path)
            own = source.head(config.draft, config.head_layers)
            return cls.of(source, config, None if own is None else own.spec)
        config_json = model_config(path)
        spec, weight_map = load_spec(config_json)
        eos_token_ids = folder_eos_token_ids(path, config_json)
        if config.draft == MTP:
            head: HeadSpec | None = stated_head(config_json, spec, weight_map)
        else:
            found = folder_head_of(config.draft, spec, None, config.head_layers)
            head = None if found is None else found.spec
        return cls(
            spec,
            eos_token_ids=eos_token_ids,
            weight_map=weight_map,
            tower=tower_spec(config_json),
            draft_head=head,
            config=config,
        )

    def load(self, spec: DecoderSpec, numerics: Numerics, max_model_len: int, communicator: Communicator) -> Decoder:
        shapes, format_of = spec.whole.shapes(), weight_formats(spec, numerics)

        def read(parameter: str, part: Part | None = None) -> HeldWeight:
            weight_format, parts = format_of(parameter), parts_of(spec, parameter) if part is None else (part,)
            if (quantized := weight_format.random(shapes[parameter], torch.Generator())) is not None:
                tensors = weight_format.parts_of_random(quantized, parts, numerics)
            else:
                dtype = torch.float32 if is_wide(self.weight_map, parameter) else numerics.dtype
                dense = torch.empty(shapes[parameter], dtype=dtype, device=numerics.device)
                tensors = weight_format.encode(dense, parts)
            return HeldWeight((parameter,), weight_format, tensors)

        builder = partial(_DistinctLayers, cache=planned_cache(self.config, spec, numerics))
        changes_layers = self.config.max_loras or self.config.routed_experts  # which look into every layer
        return build_decoder(spec, numerics, max_model_len, read, communicator, None if changes_layers else builder)

    def head(self, draft: str | None, layers: tuple[int, ...] | None = None) -> DrawnHead | None:
        return None if self.draft_head is None else DrawnHead(self.draft_head)

    def pooling(self, wanted: str) -> Pooling | None:
        return self.pooled

    def kv_scales(self) -> torch.Tensor | None:  # type: ignore[override]
        heads = max(layer.mixer.num_kv_heads for layer in self.spec.layers) if self.has_kv_scales else 0
        return torch.ones(self.spec.num_layers, 2, heads) if self.has_kv_scales else None


class _DistinctLayers(LayerBuilder):
    """Builds the first of equal layers. The others launch nothing, because their kernels are the same."""

    def __init__(self, maps: LinearMaps, num_positions: int, cache: KVCacheSpec) -> None:
        super().__init__(maps, num_positions)
        self._cache, self._built = cache, set[Any]()
        self._names: dict[str, list[str]] = {}  # each layer's parameters
        for name in self.spec.shapes():
            self._names.setdefault(".".join(name.split(".")[:2]), []).append(name)

    def layer(self, index: int) -> Layer:
        own, states = self.spec.layers[index], self._cache.states
        has_states = states is not None and index in states.layers
        group = None if has_states else self._cache.place_of(index)[0]
        formats = tuple(self.maps.format_of(name).name for name in self._names[f"layers.{index}"])
        if (kind := (own, group, formats)) in self._built:
            nothing: Any = _Nothing()
            return Layer(None, None, nothing, torch.empty(0), None, nothing)
        self._built.add(kind)
        return super().layer(index)


class _Nothing:
    """A part of a layer that does nothing."""

    def __getattr__(self, name: str) -> _Nothing:
        return self

    def __call__(self, *args: Any) -> None:
        return None


def without_side_effects(config: EngineConfig) -> EngineConfig:
    """The settings of a dry run: other processes and folders are left alone, and names do not matter."""
    return replace(config, model="", revision=None, lora=(), kv_tier_memory=0, kv_tier_folder=None, kv_tier_name=None,
                   sleep_mode=False, weight_updates=False, weight_store=None)  # fmt: skip
