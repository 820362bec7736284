"""The towers of Qwen3-VL and Qwen3.5."""

from __future__ import annotations

from typing import Any

from runtime.base.model.tower_spec import Step, TowerSpec
from runtime.models.towers.specs import parts

_QWEN_NAMES = {
    "patch": "visual.patch_embed.proj",
    "positions": "visual.pos_embed.weight",
    **{part: f"visual.merger.{part}" for part in ("norm", "linear_fc1", "linear_fc2")},
    **{
        f"deepstack.{{}}.{part}": f"visual.deepstack_merger_list.{{}}.{part}"
        for part in ("norm", "linear_fc1", "linear_fc2")
    },
} | parts.layer_names(
    "visual.blocks.{}.",
    norm1="norm1",
    norm2="norm2",
    qkv="attn.qkv",
    out="attn.proj",
    up="mlp.linear_fc1",
    down="mlp.linear_fc2",
)


_QWEN: dict[str, Any] = {  # defaults of Qwen3-VL and Qwen3.5
    "hidden_size": 1152, "intermediate_size": 4304, "depth": 27, "num_heads": 16, "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh", "spatial_merge_size": 2, "num_position_embeddings": 2304,
}  # fmt: skip


def qwen3_5(
    config: parts.Config, vision: dict[str, Any], text: parts.Config, deepstack: tuple[int, ...] = ()
) -> TowerSpec:
    vision = _QWEN | vision
    hidden, merge = vision["hidden_size"], vision["spatial_merge_size"]
    inner = hidden * merge**2
    steps = (
        Step("norm", "norm", (hidden,), True),
        Step("blocks"),
        Step("linear", "linear_fc1", (inner, inner), True),
        Step("gelu"),
        Step("linear", "linear_fc2", (text["hidden_size"], inner), True),
    )
    later = (steps[1], Step("norm", "norm", (inner,), True), *steps[2:])
    return TowerSpec(
        **parts.sizes(vision, text),
        merge=merge,
        projector=steps,
        names=_QWEN_NAMES,
        activation=parts.activation(vision["hidden_act"]),
        joint_qkv=True,
        positions="bilinear",
        position_shape=(vision["num_position_embeddings"], hidden),
        rope="halves",
        rope_theta=parts.theta(vision, 10_000.0),
        deepstack=deepstack,
        deepstack_projector=tuple(
            step._replace(name=f"deepstack.{{}}.{step.name}") if step.name else step for step in later
        ),
    )


def qwen3_vl(config: parts.Config, vision: dict[str, Any], text: parts.Config) -> TowerSpec:
    return qwen3_5(config, vision, text, tuple(vision.get("deepstack_visual_indexes", (8, 16, 24))))
