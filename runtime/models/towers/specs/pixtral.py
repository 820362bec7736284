"""Pixtral, the tower of Mistral 3."""

from __future__ import annotations

from typing import Any

from runtime.base.model.tower_spec import Step, TowerSpec
from runtime.models.towers.specs import parts

_PIXTRAL_NAMES = {
    "patch": "vision_tower.patch_conv",
    "patch_norm": "vision_tower.ln_pre",
    "norm": "multi_modal_projector.norm",
    "merging": "multi_modal_projector.patch_merger.merging_layer",
    **parts.PROJECTOR_NAMES,
} | parts.layer_names(
    "vision_tower.transformer.layers.{}.",
    norm1="attention_norm",
    norm2="ffn_norm",
    qkv_proj="attention.?_proj",
    out="attention.o_proj",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
)


_PIXTRAL: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "patch_size": 16, "hidden_act": "gelu",
}  # fmt: skip


def mistral3(config: parts.Config, vision: dict[str, Any], text: parts.Config) -> TowerSpec:
    vision = _PIXTRAL | vision
    hidden, out, merge = vision["hidden_size"], text["hidden_size"], config.get("spatial_merge_size", 2)
    bias = config.get("multimodal_projector_bias", False)
    return TowerSpec(
        **parts.sizes(vision, text) | {"num_layers": parts.last_layer(config, vision["num_hidden_layers"])},
        merge=merge,
        projector=(
            Step("rms", "norm", (hidden,), eps=text["rms_norm_eps"]),
            Step("channels"),
            Step("linear", "merging", (hidden, hidden * merge**2)),
            *parts.two_maps(config, hidden, out, out, bias),
        ),
        names=_PIXTRAL_NAMES,
        activation=parts.activation(vision["hidden_act"]),
        gated=True,
        qkv_bias=False,
        bias=False,
        patch_bias=False,
        norm="rms",
        norm_eps=1e-5,
        patch_norm=True,
        rope="interleaved",
        rope_theta=parts.theta(vision, 10_000.0),
        mean=parts.CLIP_MEAN,
        std=parts.CLIP_STD,
    )
