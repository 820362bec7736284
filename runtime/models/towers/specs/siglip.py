"""Towers with learned positions: SigLIP in Idefics 3, Gemma 3 and LFM2-VL, and InternVL."""

from __future__ import annotations

from typing import Any

from runtime.base.model.tower_spec import Step, TowerSpec
from runtime.base.types import CallboardError
from runtime.models.towers.specs import parts

_SIGLIP: dict[str, Any] = {  # defaults of transformers' SiglipVisionConfig and Siglip2VisionConfig
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "num_patches": 256,
}  # fmt: skip


def _siglip_names(tower: str) -> dict[str, str]:
    return {
        "patch": f"{tower}.embeddings.patch_embedding",
        "positions": f"{tower}.embeddings.position_embedding.weight",
        "post_norm": f"{tower}.post_layernorm",
    } | parts.layer_names(
        f"{tower}.encoder.layers.{{}}.",
        norm1="layer_norm1",
        norm2="layer_norm2",
        qkv_proj="self_attn.?_proj",
        out="self_attn.out_proj",
        up="mlp.fc1",
        down="mlp.fc2",
    )


def _siglip(vision: dict[str, Any], text: parts.Config) -> dict[str, Any]:
    return parts.sizes(vision, text) | {
        "activation": parts.activation(vision["hidden_act"]),
        "norm_eps": vision["layer_norm_eps"],
        "position_shape": ((vision["image_size"] // vision["patch_size"]) ** 2, vision["hidden_size"]),
    }


def idefics3(config: parts.Config, vision: dict[str, Any], text: parts.Config) -> TowerSpec:
    vision = _SIGLIP | {"hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32} | vision
    hidden, merge = vision["hidden_size"], config.get("scale_factor", 2)
    return TowerSpec(
        **_siglip(vision, text),
        merge=merge,
        positions="buckets",
        projector=(
            Step("norm", "post_norm", (hidden,), True, vision["layer_norm_eps"]),
            Step("blocks"),
            Step("linear", "projection", (text["hidden_size"], hidden * merge**2)),
        ),
        names=_siglip_names("vision_model") | {"projection": "connector.modality_projection.proj"},
    )


def gemma3(config: parts.Config, vision: dict[str, Any], text: parts.Config) -> TowerSpec:
    vision = _SIGLIP | vision
    hidden, side = vision["hidden_size"], vision["image_size"] // vision["patch_size"]
    tokens = round((config.get("mm_tokens_per_image") or 256) ** 0.5)
    if side % tokens:
        raise CallboardError(f"The model's pictures have {side} patches a side, which {tokens} tokens cannot divide.")
    return TowerSpec(
        **_siglip(vision, text),
        merge=side // tokens,
        positions="learned",
        projector=(
            Step("norm", "post_norm", (hidden,), True, vision["layer_norm_eps"]),
            Step("mean"),
            Step("rms_plus_one", "soft_norm", (hidden,), eps=vision["layer_norm_eps"]),
            Step("matmul", "projection", (hidden, text["hidden_size"])),
        ),
        names=_siglip_names("vision_tower")
        | {
            "soft_norm": "multi_modal_projector.mm_soft_emb_norm",
            "projection.weight": "multi_modal_projector.mm_input_projection_weight",
        },
    )


def lfm2(config: parts.Config, vision: dict[str, Any], text: parts.Config) -> TowerSpec:
    vision = _SIGLIP | vision
    hidden, merge = vision["hidden_size"], config.get("downsample_factor", 2)
    size, bias = config.get("projector_hidden_size", 2560), config.get("projector_bias", True)
    norm = (Step("norm", "norm", (hidden * merge**2,), True, 1e-5),)
    return TowerSpec(
        **_siglip(vision, text) | {"position_shape": (vision["num_patches"], hidden)},
        merge=merge,
        positions="resized",
        projector=(
            Step("norm", "post_norm", (hidden,), True, vision["layer_norm_eps"]),
            Step("blocks"),
            *(norm if config.get("projector_use_layernorm", True) else ()),
            *parts.two_maps(config, hidden * merge**2, size, text["hidden_size"], bias),
        ),
        names=_siglip_names("vision_tower") | parts.PROJECTOR_NAMES | {"norm": "multi_modal_projector.layer_norm"},
    )


_INTERNVL_NAMES = {
    "class_token": "vision_tower.embeddings.cls_token",
    "patch": "vision_tower.embeddings.patch_embeddings.projection",
    "positions": "vision_tower.embeddings.position_embeddings",
    "norm": "multi_modal_projector.layer_norm",
    **parts.PROJECTOR_NAMES,
} | parts.layer_names(
    "vision_tower.encoder.layer.{}.",
    norm1="layernorm_before",
    norm2="layernorm_after",
    qkv_proj="attention.?_proj",
    out="attention.projection_layer",
    up="mlp.fc1",
    down="mlp.fc2",
    scale1="lambda_1",
    scale2="lambda_2",
)


_INTERNVL: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "attention_bias": False,
    "norm_type": "layer_norm", "use_qk_norm": False, "use_mean_pooling": True,
    "use_absolute_position_embeddings": True,
}  # fmt: skip


def internvl(config: parts.Config, vision: dict[str, Any], text: parts.Config) -> TowerSpec:
    vision = _INTERNVL | vision
    for name, supported in (("use_qk_norm", False), ("use_mean_pooling", True), ("norm_type", "layer_norm")):
        if vision[name] != supported:
            raise CallboardError(f"The image encoder's {name} is {vision[name]}; supported is {supported}.")
    hidden, merge, out = vision["hidden_size"], int(1 / config.get("downsample_ratio", 0.5)), text["hidden_size"]
    siglip = _siglip(vision, text)
    return TowerSpec(
        **siglip
        | {
            "num_layers": parts.last_layer(config, vision["num_hidden_layers"]),
            "position_shape": (siglip["position_shape"][0] + 1, hidden),
        },
        merge=merge,
        positions="learned",
        class_token=True,
        qkv_bias=vision["attention_bias"],
        layer_scales=True,
        projector=(
            Step("blocks"),
            Step("norm", "norm", (hidden * merge**2,), True, 1e-5),
            *parts.two_maps(config, hidden * merge**2, out, out, True),
        ),
        names=_INTERNVL_NAMES,
        mean=parts.CLIP_MEAN,
        std=parts.CLIP_STD,
    )
