"""The tower of GLM-4V."""

from __future__ import annotations

from typing import Any

from runtime.base.model.tower_spec import Step, TowerSpec
from runtime.models.towers.specs import parts

_GATED = ("gate", "up", "down")
_NAMES = {
    "patch": "visual.patch_embed.proj",
    "patch_norm": "visual.post_conv_layernorm",
    "positions": "visual.embeddings.position_embedding.weight",
    "post_norm": "visual.post_layernorm",
    "downsample": "visual.downsample",
    "projection": "visual.merger.proj",
    "norm": "visual.merger.post_projection_norm",
    **{f"merger.{part}": f"visual.merger.{part}_proj" for part in _GATED},
} | parts.layer_names(
    "visual.blocks.{}.",
    norm1="norm1",
    norm2="norm2",
    qkv="attn.qkv",
    out="attn.proj",
    **{part: f"mlp.{part}_proj" for part in _GATED},
)
_GLM: dict[str, Any] = {
    "hidden_size": 1536, "intermediate_size": 13696, "out_hidden_size": 4096, "depth": 24, "num_heads": 12,
    "image_size": 336, "patch_size": 14, "spatial_merge_size": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "attention_bias": False,
}  # fmt: skip


def glm4v(config: parts.Config, vision: dict[str, Any], text: parts.Config) -> TowerSpec:
    vision = _GLM | vision
    hidden, merge, out, eps = (
        vision["hidden_size"],
        vision["spatial_merge_size"],
        text["hidden_size"],
        vision["rms_norm_eps"],
    )
    return TowerSpec(
        **parts.sizes(vision, text) | {"ffn_size": vision["out_hidden_size"]},
        merge=merge,
        projector=(
            Step("rms", "post_norm", (hidden,), eps=eps),
            Step("channels"),
            Step("linear", "downsample", (out, hidden * merge**2), True),
            Step("linear", "projection", (out, out)),
            Step("norm", "norm", (out,), True, 1e-5),
            Step("gelu"),
            Step("gated", "merger", (vision["intermediate_size"], out)),
        ),
        names=_NAMES,
        activation=parts.activation(vision["hidden_act"]),
        gated=True,
        joint_qkv=True,
        qkv_bias=vision["attention_bias"],
        bias=False,
        norm="rms",
        norm_eps=eps,
        patch_norm=True,
        positions="bicubic",
        position_shape=((vision["image_size"] // vision["patch_size"]) ** 2, hidden),
        rope="halves",
        rope_theta=parts.theta(vision, 10_000.0),
        mean=parts.CLIP_MEAN,
        std=parts.CLIP_STD,
    )
