"""The Llama family: Llama 2 and 3.x, SmolLM2, and whoever publishes as LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.core.types import CallboardError
from runtime.models.spec import DecoderSpec, RopeSpec

# Our parameter -> the checkpoint's tensor; {} is the layer, .weight or .bias follows a linear map's name.
NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "out": "model.layers.{}.self_attn.o_proj",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
}


def rope_spec(config: Mapping[str, Any]) -> RopeSpec:
    """From `rope_theta` + `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5)."""
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)} | (
        config.get("rope_scaling") or {}
    )
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", float(rope["factor"]))
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        original = int(rope["original_max_position_embeddings"])
        return RopeSpec(theta, "llama3", float(rope["factor"]), low, high, original)
    raise CallboardError(f"The model's rope type is {kind!r}; supported are default, linear and llama3.")


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for an activation or a rope type that is not supported."""
    if config.get("hidden_act", "silu") != "silu":
        raise CallboardError(f"The model's hidden_act is {config['hidden_act']!r}; supported is silu.")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return DecoderSpec(
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        ffn_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_positions=config.get("max_position_embeddings", 2048),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope_spec(config),
        tied_head=config.get("tie_word_embeddings", False),
        qkv_bias=config.get("attention_bias", False),
        out_bias=config.get("attention_bias", False),
        ffn_bias=config.get("mlp_bias", False),
    )
