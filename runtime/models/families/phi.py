"""Phi-3, Phi-3.5 and Phi-4-mini: a Llama with q, k and v as one tensor in checkpoints, and gate and up as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.models.families import llama, mistral
from runtime.models.rope import rope_parameters
from runtime.models.weight_map import WeightMap

WEIGHT_MAP = WeightMap({
    **llama.WEIGHT_MAP.names,
    "qkv": "model.layers.{}.self_attn.qkv_proj",
    "gate_up": "model.layers.{}.mlp.gate_up_proj",
})  # fmt: skip


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for what llama refuses."""
    # The original context stands beside the scaling, not in it.
    original = "original_max_position_embeddings"
    config = {**config, "rope_scaling": rope_parameters(config) | {original: config[original]}}
    return mistral.windowed(config, llama.attention(config, fused_qkv=True), llama.ffn(config, fused_gate_up=True))
