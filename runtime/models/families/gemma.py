"""The Gemma family: Gemma 2 (soft caps) and the text part of Gemma 3 (QK norm, two RoPE bases). In both, layers with
a window alternate with layers that attend to all positions, four norms a block multiply by 1 + w, and embeddings are
scaled. `gemma4.py` has Gemma 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.types import CallboardError
from runtime.models.families import llama
from runtime.models.rope import rope_spec, ropes_by_kind
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
    base="language_model.",  # of models with images
    norms_plus_one=True,
    ignored=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
)


def gemma2_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for an activation or a rope type that is not supported."""
    return _spec(config, 2)


def gemma3_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of the config of a text model, or of the text part of one."""
    full, sliding = ropes_by_kind(config)
    local = rope_spec({**config, "rope_theta": config["rope_local_base_freq"], **sliding})
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    return replace(_spec({**config, **full}, pattern), qk_norm=True, local_rope=local)


def _spec(config: Mapping[str, Any], pattern: int) -> DecoderSpec:
    """The common part of both specs. Every `pattern`-th layer attends to all positions."""
    if (activation := config["hidden_activation"]) != "gelu_pytorch_tanh":
        raise CallboardError(f"The model's hidden_activation is {activation!r}; supported is gelu_pytorch_tanh.")
    if config.get("use_bidirectional_attention"):
        raise CallboardError("The model's use_bidirectional_attention is true; only causal attention is supported.")
    spec = llama.decoder_spec({**config, "hidden_act": "silu"})
    kinds = config["layer_types"] or [
        "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(spec.num_layers)
    ]
    return replace(
        spec,
        activation="gelu_tanh",
        post_norms=True,
        embed_scale=spec.hidden_size**0.5,
        attn_scale=config["query_pre_attn_scalar"] ** -0.5,
        attn_soft_cap=config["attn_logit_softcapping"] or 0.0,
        logit_soft_cap=config["final_logit_softcapping"] or 0.0,
        window=config["sliding_window"],
        sliding=tuple(kind == "sliding_attention" for kind in kinds),
    )
