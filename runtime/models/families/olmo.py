"""The OLMo family: norms of q and k over all heads.

- OLMo 2 and 3 have norms after attention and the feed-forward layer but none before.
- In OLMo 3, three of four layers have a window, and only the others have a stretched RoPE.
- OLMoE has norms before them, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec
from runtime.base.types import CallboardError
from runtime.models.families import llama, qwen
from runtime.models.rope import rope_spec, ropes_by_kind
from runtime.models.weight_map import WeightMap

_HEADS_NORMS = {
    "q_heads_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_heads_norm": "model.layers.{}.self_attn.k_norm.weight",
}
WEIGHT_MAP = WeightMap({
    **llama.WEIGHT_MAP.names,
    **_HEADS_NORMS,
    "post_attn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "post_ffn_norm": "model.layers.{}.post_feedforward_layernorm.weight",
})  # fmt: skip
MOE_WEIGHT_MAP = WeightMap({**llama.WEIGHT_MAP.names, **qwen.EXPERT_NAMES, **_HEADS_NORMS})


def olmo2_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for what llama refuses."""
    spec = llama.decoder_spec(config)
    return replace(spec, qk_norm=True, qk_norm_all_heads=True, pre_norms=False, post_norms=True)


def olmo3_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of an OLMo 3."""
    full, sliding = ropes_by_kind(config)
    spec = olmo2_spec({**config, **full})
    kinds = config["layer_types"] or [
        "full_attention" if i % 4 == 0 else "sliding_attention" for i in range(1, spec.num_layers + 1)
    ]
    return replace(
        spec,
        local_rope=rope_spec({**config, **sliding}),
        window=config["sliding_window"],
        sliding=tuple(kind == "sliding_attention" for kind in kinds),
    )


def moe_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of an OLMoE; raises CallboardError if it clips q, k and v."""
    if config["clip_qkv"] is not None:
        raise CallboardError(f"The model's clip_qkv is {config['clip_qkv']!r}; only models without it are supported.")
    experts = ExpertsSpec(config["num_experts"], config["num_experts_per_tok"], config["norm_topk_prob"])
    spec = llama.decoder_spec(config)
    return replace(spec, qk_norm=True, qk_norm_all_heads=True, experts=experts)
