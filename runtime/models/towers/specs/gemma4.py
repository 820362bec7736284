"""The tower of Gemma 4."""

from __future__ import annotations

from typing import Any

from runtime.base.model.tower_spec import Step, TowerSpec
from runtime.base.types import CallboardError
from runtime.models.towers.specs import parts

_GEMMA4_NAMES = {
    "patch": "vision_tower.patch_embedder.input_proj",
    "positions": "vision_tower.patch_embedder.position_embedding_table",
    "standard.bias": "vision_tower.std_bias",
    "standard.weight": "vision_tower.std_scale",
    "projection": "embed_vision.embedding_projection",
} | parts.layer_names(
    "vision_tower.encoder.layers.{}.",
    norm1="input_layernorm",
    post_norm1="post_attention_layernorm",
    norm2="pre_feedforward_layernorm",
    post_norm2="post_feedforward_layernorm",
    qkv_proj="self_attn.?_proj.linear",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    out="self_attn.o_proj.linear",
    gate="mlp.gate_proj.linear",
    up="mlp.up_proj.linear",
    down="mlp.down_proj.linear",
)


_GEMMA4: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
    "num_key_value_heads": 12, "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3, "patch_size": 16, "position_embedding_size": 10240, "use_clipped_linears": False,
    "standardize": False, "attention_bias": False,
}  # fmt: skip


def gemma4(config: parts.Config, vision: dict[str, Any], text: parts.Config) -> TowerSpec:
    vision = _GEMMA4 | vision
    hidden, heads = vision["hidden_size"], vision["num_attention_heads"]
    if vision["num_key_value_heads"] != heads:
        raise CallboardError(f"The image encoder has {vision['num_key_value_heads']} key heads; supported are {heads}.")
    standard = (Step("standard", "standard", (hidden,), True),)
    return TowerSpec(
        **parts.sizes(vision, text) | {"head_dim": vision["head_dim"]},
        merge=vision["pooling_kernel_size"],
        projector=(
            Step("mean"),
            Step("root"),
            *(standard if vision["standardize"] else ()),
            Step("rms", eps=vision["rms_norm_eps"]),
            Step("linear", "projection", (text["hidden_size"], hidden)),
        ),
        names=_GEMMA4_NAMES,
        activation=parts.activation(vision["hidden_activation"]),
        gated=True,
        qkv_bias=vision["attention_bias"],
        bias=False,
        patch_bias=False,
        norm="rms",
        norm_eps=vision["rms_norm_eps"],
        post_norms=True,
        qk_norm=True,
        scale=1.0,
        limits=vision["use_clipped_linears"],
        positions="tables",
        position_shape=(2, vision["position_embedding_size"], hidden),
        rope="axes",
        rope_theta=parts.theta(vision, 100.0),
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        doubles_pixels=True,
    )
