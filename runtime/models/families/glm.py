"""The dense GLM-4 family: rotary pairs of neighbours in half of a head, biases on q, k and v, gate and up as one.
Glm4ForCausalLM (GLM-4-0414) also has norms after attention and after the feed-forward layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.models.families import llama
from runtime.models.weight_map import WeightMap
from runtime.spec.decoder_spec import DecoderSpec

WEIGHT_MAP = WeightMap({**llama.WEIGHT_MAP.names, "gate_up": "model.layers.{}.mlp.gate_up_proj"})
POST_NORMS_WEIGHT_MAP = WeightMap({
    **WEIGHT_MAP.names,
    "post_attn_norm": "model.layers.{}.post_self_attn_layernorm.weight",
    "post_ffn_norm": "model.layers.{}.post_mlp_layernorm.weight",
})  # fmt: skip
# Defaults that configs leave out.
_DEFAULTS: dict[str, Any] = {
    "attention_bias": True, "head_dim": 128, "num_key_value_heads": 2, "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07,
}  # fmt: skip


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for what llama refuses."""
    spec = llama.decoder_spec(_DEFAULTS | dict(config))
    return replace(spec, out_bias=False, fused_gate_up=True, rope=replace(spec.rope, interleaved=True))


def post_norms_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Glm4ForCausalLM."""
    return replace(decoder_spec(config), post_norms=True)
