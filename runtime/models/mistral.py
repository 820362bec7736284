"""The Mistral family: Mistral 7B, a Llama whose first version attends in a sliding window, and Mixtral's experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.core.decoder_spec import DecoderSpec, ExpertsSpec
from runtime.models import llama
from runtime.models.weight_map import WeightMap

WEIGHT_MAP = llama.WEIGHT_MAP
MOE_WEIGHT_MAP = WeightMap({
    **WEIGHT_MAP.names,
    "router": "model.layers.{}.block_sparse_moe.gate",
    "gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
    "up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
    "down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
})  # fmt: skip


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for what llama refuses."""
    spec = llama.decoder_spec(config)
    if not (window := config.get("sliding_window")):
        return spec
    return replace(spec, window=window, sliding=(True,) * spec.num_layers)


def moe_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Mixtral's config.json, likewise."""
    experts = ExpertsSpec(config["num_local_experts"], config["num_experts_per_tok"], normalized=True)
    return replace(decoder_spec(config), experts=experts)
