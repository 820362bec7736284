"""OLMo 2 and 3: norms after attention and the feed-forward layer but none before, and norms of q and k over all heads.
In OLMo 3, three of four layers have a window, and only the others have a stretched RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.models.families import llama
from runtime.models.weight_map import WeightMap
from runtime.spec.decoder_spec import DecoderSpec, RopeSpec

WEIGHT_MAP = WeightMap({
    **llama.WEIGHT_MAP.names,
    "post_attn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "post_ffn_norm": "model.layers.{}.post_feedforward_layernorm.weight",
    "q_heads_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_heads_norm": "model.layers.{}.self_attn.k_norm.weight",
})  # fmt: skip


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
