"""The Gemma family: Gemma 2 (soft caps) and the text part of Gemma 3 (QK norm, two RoPE bases). In both, layers with
a window alternate with layers that attend to all positions, four norms a block multiply by 1 + w, and embeddings are
scaled. `gemma4.py` has Gemma 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.base.model.decoder_spec import AttentionSpec, DecoderSpec, FfnSpec, LayerSpec
from runtime.base.model.layer_spec import POST_NORMS, PRE_NORMS
from runtime.base.types import CallboardError
from runtime.models.families import llama
from runtime.models.rope import ropes_by_kind
from runtime.models.weight_map import WeightMap

WEIGHT_MAP = WeightMap(
    {
        **llama.WEIGHT_MAP.names,
        "post_attn_norm": "model.layers.{}.post_attention_layernorm.weight",
        "ffn_norm": "model.layers.{}.pre_feedforward_layernorm.weight",
        "post_ffn_norm": "model.layers.{}.post_feedforward_layernorm.weight",
        "q_norm": "model.layers.{}.self_attn.q_norm.weight",
        "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    },
    base="language_model.",  # models with images
    norms_plus_one=True,
)


def gemma2_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for an activation or a rope type that is not supported."""
    attention = _attention(config)
    return _decoder(config, attention, attention, pattern=2)


def gemma3_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec for a text model's config, or for a text part's."""
    ropes = ropes_by_kind(config)
    own: dict[str, Any] = {"qk_norm": "head", "whole_images": True}
    full = _attention({**config, **ropes[0]}, **own)
    sliding = _attention({**config, "rope_theta": config["rope_local_base_freq"], **ropes[1]}, **own)
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    return _decoder(config, full, sliding, pattern)


def ffn(config: Mapping[str, Any], **own: Any) -> FfnSpec:
    """A feed-forward layer; raises CallboardError for an activation that is not supported."""
    if (activation := config["hidden_activation"]) != "gelu_pytorch_tanh":
        raise CallboardError(f"The model's hidden_activation is {activation!r}; supported is gelu_pytorch_tanh.")
    return llama.ffn({**config, "hidden_act": "silu"}, activation="gelu_tanh", **own)


def _attention(config: Mapping[str, Any], **own: Any) -> AttentionSpec:
    if config.get("use_bidirectional_attention"):
        raise CallboardError("The model's use_bidirectional_attention is true; only causal attention is supported.")
    scale, cap = config["query_pre_attn_scalar"] ** -0.5, config["attn_logit_softcapping"] or 0.0
    return llama.attention(config, scale=scale, soft_cap=cap, **own)


def _decoder(config: Mapping[str, Any], full: AttentionSpec, sliding: AttentionSpec, pattern: int) -> DecoderSpec:
    """Every `pattern`-th layer attends to all positions."""
    mixers, mlp = llama.attentions(config, full, lambda i: bool((i + 1) % pattern), sliding), ffn(config)
    return decoder(config, [LayerSpec(mixer, mlp, PRE_NORMS + POST_NORMS) for mixer in mixers])


def decoder(config: Mapping[str, Any], layers: list[LayerSpec]) -> DecoderSpec:
    """A decoder of these layers, with scaled embeddings."""
    ends = {"embed_scale": config["hidden_size"] ** 0.5, "logit_soft_cap": config["final_logit_softcapping"] or 0.0}
    return llama.decoder(config, layers, **ends)
