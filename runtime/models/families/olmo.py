"""The OLMo family: norms of q and k over all heads.

- OLMo 2 and 3 have norms after attention and the feed-forward layer but none before.
- In OLMo 3, three of four layers have a window, and only the others have a stretched RoPE.
- OLMoE has norms before them, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.models.families import llama, qwen
from runtime.models.weight_map import WeightMap
from runtime.spec.decoder_spec import DecoderSpec, ExpertsSpec, RopeSpec
from runtime.spec.types import CallboardError

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
    spec = llama.decoder_spec({"rms_norm_eps": 1e-5, **config})
    return replace(spec, qk_norm=True, qk_norm_all_heads=True, pre_norms=False, post_norms=True)


def olmo3_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of an OLMo 3."""
    config = {"rope_theta": 500000.0, **config}
    ropes = config.get("rope_parameters") or {}
    if "full_attention" in ropes:  # each kind of layer has its own RoPE
        config["rope_parameters"] = ropes["full_attention"]
    spec = olmo2_spec(config)
    kinds = config.get("layer_types") or [
        "full_attention" if i % 4 == 0 else "sliding_attention" for i in range(1, spec.num_layers + 1)
    ]
    return replace(
        spec,
        local_rope=RopeSpec(float(ropes.get("sliding_attention", {}).get("rope_theta", spec.rope.theta))),
        window=config.get("sliding_window") or 4096,
        sliding=tuple(kind == "sliding_attention" for kind in kinds),
    )


def moe_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of an OLMoE; raises CallboardError if it clips q, k and v."""
    if config.get("clip_qkv") is not None:
        raise CallboardError(f"The model's clip_qkv is {config['clip_qkv']!r}; only models without it are supported.")
    experts = ExpertsSpec(config["num_experts"], config["num_experts_per_tok"], config.get("norm_topk_prob", False))
    spec = llama.decoder_spec({"rms_norm_eps": 1e-5, **config})
    return replace(spec, qk_norm=True, qk_norm_all_heads=True, experts=experts)
