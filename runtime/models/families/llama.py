"""The Llama family: Llama 2 and 3.x, SmolLM2, and other models published as LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.types import CallboardError
from runtime.models.rope import context, rope_spec
from runtime.models.weight_map import WeightMap

WEIGHT_MAP = WeightMap({
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "ffn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "out": "model.layers.{}.self_attn.o_proj",
    "sinks": "model.layers.{}.self_attn.sinks",
    "gate": "model.layers.{}.mlp.gate_proj",
    "up": "model.layers.{}.mlp.up_proj",
    "down": "model.layers.{}.mlp.down_proj",
})  # fmt: skip


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for an activation or a rope type that is not supported."""
    if config["hidden_act"] != "silu":
        raise CallboardError(f"The model's hidden_act is {config['hidden_act']!r}; supported is silu.")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rope = rope_spec(config)
    return DecoderSpec(
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config["num_key_value_heads"] or heads,
        head_dim=config["head_dim"] or hidden // heads,
        ffn_size=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        max_positions=context(config, rope),
        norm_eps=config["rms_norm_eps"],
        rope=rope,
        tied_head=config["tie_word_embeddings"],
        qkv_bias=config["attention_bias"],
        out_bias=config.get("stored_out_bias", config["attention_bias"]),  # a GGUF file states both
        ffn_bias=config["mlp_bias"],
    )
