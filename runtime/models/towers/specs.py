"""The towers of families: a TowerSpec from a config.json, with transformers' defaults for keys that it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runtime.base.model.tower_spec import Step, TowerSpec
from runtime.base.types import CallboardError
from runtime.models.families.defaults import with_defaults

Config = Mapping[str, Any]
_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "quick_gelu": "quick_gelu"}
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def takes_images(architecture: str) -> bool:
    """Return True if the family's models have an image encoder."""
    return architecture in _TOWERS


def tower_spec(config: Config) -> TowerSpec | None:
    """Return the image encoder that a config.json describes; None for a model that takes no images.

    Raises CallboardError for a variant that is not supported."""
    named, vision = config.get("architectures"), config.get("vision_config")
    name = str(named[-1]) if isinstance(named, list) and named else ""  # a GGUF file's text is the first
    if name not in _TOWERS or not isinstance(vision, Mapping):
        return None
    return _TOWERS[name](config, dict(vision), with_defaults(config, name))


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise CallboardError(f"The image encoder's activation is {name!r}; supported are {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


_SIGLIP: dict[str, Any] = {  # defaults of transformers' SiglipVisionConfig and Siglip2VisionConfig
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "num_patches": 256,
}  # fmt: skip


def _layer_names(layer: str, **parts: str) -> dict[str, str]:
    """Return the tensors of a layer's parts. q, k and v share a name with ? for their letter."""
    if "qkv_proj" in parts:
        own = parts.pop("qkv_proj")
        parts |= {part: own.replace("?", part) for part in ("q", "k", "v")}
    return {f"layers.{{}}.{part}": layer + name for part, name in parts.items()}


def _siglip_names(tower: str) -> dict[str, str]:
    return {
        "patch": f"{tower}.embeddings.patch_embedding",
        "positions": f"{tower}.embeddings.position_embedding.weight",
        "post_norm": f"{tower}.post_layernorm",
    } | _layer_names(
        f"{tower}.encoder.layers.{{}}.",
        norm1="layer_norm1",
        norm2="layer_norm2",
        qkv_proj="self_attn.?_proj",
        out="self_attn.out_proj",
        up="mlp.fc1",
        down="mlp.fc2",
    )


def _sizes(vision: dict[str, Any], text: Config) -> dict[str, Any]:
    """Return the fields that most configurations name alike."""
    hidden, heads = vision["hidden_size"], vision["num_attention_heads"]
    return {
        "num_layers": vision["num_hidden_layers"],
        "hidden_size": hidden,
        "ffn_size": vision["intermediate_size"],
        "num_heads": heads,
        "head_dim": hidden // heads,
        "out_size": text["hidden_size"],
        "patch_size": vision["patch_size"],
    }


def _siglip(vision: dict[str, Any], text: Config) -> dict[str, Any]:
    return _sizes(vision, text) | {
        "activation": _activation(vision["hidden_act"]),
        "norm_eps": vision["layer_norm_eps"],
        "position_shape": ((vision["image_size"] // vision["patch_size"]) ** 2, vision["hidden_size"]),
    }


def _idefics3(config: Config, vision: dict[str, Any], text: Config) -> TowerSpec:
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


def _gemma3(config: Config, vision: dict[str, Any], text: Config) -> TowerSpec:
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


def _lfm2(config: Config, vision: dict[str, Any], text: Config) -> TowerSpec:
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
            Step("linear", "linear_1", (size, hidden * merge**2), bias),
            Step(_activation(config.get("projector_hidden_act", "gelu"))),
            Step("linear", "linear_2", (text["hidden_size"], size), bias),
        ),
        names=_siglip_names("vision_tower")
        | {
            "norm": "multi_modal_projector.layer_norm",
            "linear_1": "multi_modal_projector.linear_1",
            "linear_2": "multi_modal_projector.linear_2",
        },
    )


_INTERNVL_NAMES = {
    "class_token": "vision_tower.embeddings.cls_token",
    "patch": "vision_tower.embeddings.patch_embeddings.projection",
    "positions": "vision_tower.embeddings.position_embeddings",
    "norm": "multi_modal_projector.layer_norm",
    "linear_1": "multi_modal_projector.linear_1",
    "linear_2": "multi_modal_projector.linear_2",
} | _layer_names(
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


def _internvl(config: Config, vision: dict[str, Any], text: Config) -> TowerSpec:
    vision = _INTERNVL | vision
    for name, supported in (("use_qk_norm", False), ("use_mean_pooling", True), ("norm_type", "layer_norm")):
        if vision[name] != supported:
            raise CallboardError(f"The image encoder's {name} is {vision[name]}; supported is {supported}.")
    for name in ("image_size", "patch_size"):
        sides = vision[name] if isinstance(vision[name], list | tuple) else [vision[name]]
        if len(set(sides)) != 1:
            raise CallboardError(f"The image encoder's {name} is {sides}; supported are squares.")
        vision[name] = sides[0]
    hidden, merge, out = vision["hidden_size"], int(1 / config.get("downsample_ratio", 0.5)), text["hidden_size"]
    siglip = _siglip(vision, text)
    return TowerSpec(
        **siglip
        | {
            "num_layers": _last_layer(config, vision["num_hidden_layers"]),
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
            Step("linear", "linear_1", (out, hidden * merge**2), True),
            Step(_activation(config.get("projector_hidden_act", "gelu"))),
            Step("linear", "linear_2", (out, out), True),
        ),
        names=_INTERNVL_NAMES,
        mean=_CLIP_MEAN,
        std=_CLIP_STD,
    )


_PIXTRAL_NAMES = {
    "patch": "vision_tower.patch_conv",
    "patch_norm": "vision_tower.ln_pre",
    "norm": "multi_modal_projector.norm",
    "merging": "multi_modal_projector.patch_merger.merging_layer",
    "linear_1": "multi_modal_projector.linear_1",
    "linear_2": "multi_modal_projector.linear_2",
} | _layer_names(
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


def _mistral3(config: Config, vision: dict[str, Any], text: Config) -> TowerSpec:
    vision = _PIXTRAL | vision
    hidden, out, merge = vision["hidden_size"], text["hidden_size"], config.get("spatial_merge_size", 2)
    bias = config.get("multimodal_projector_bias", False)
    return TowerSpec(
        **_sizes(vision, text) | {"num_layers": _last_layer(config, vision["num_hidden_layers"])},
        merge=merge,
        projector=(
            Step("rms", "norm", (hidden,), eps=text["rms_norm_eps"]),
            Step("channels"),
            Step("linear", "merging", (hidden, hidden * merge**2)),
            Step("linear", "linear_1", (out, hidden), bias),
            Step(_activation(config.get("projector_hidden_act", "gelu"))),
            Step("linear", "linear_2", (out, out), bias),
        ),
        names=_PIXTRAL_NAMES,
        activation=_activation(vision["hidden_act"]),
        gated=True,
        qkv_bias=False,
        bias=False,
        patch_bias=False,
        norm="rms",
        norm_eps=1e-5,
        patch_norm=True,
        rope="interleaved",
        rope_theta=_theta(vision, 10_000.0),
        mean=_CLIP_MEAN,
        std=_CLIP_STD,
    )


_QWEN_NAMES = {
    "patch": "visual.patch_embed.proj",
    "positions": "visual.pos_embed.weight",
    **{part: f"visual.merger.{part}" for part in ("norm", "linear_fc1", "linear_fc2")},
    **{
        f"deepstack.{{}}.{part}": f"visual.deepstack_merger_list.{{}}.{part}"
        for part in ("norm", "linear_fc1", "linear_fc2")
    },
} | _layer_names(
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


def _qwen3_5(config: Config, vision: dict[str, Any], text: Config, deepstack: tuple[int, ...] = ()) -> TowerSpec:
    vision = _QWEN | vision
    vision |= {"num_hidden_layers": vision["depth"], "num_attention_heads": vision["num_heads"]}
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
        **_sizes(vision, text),
        merge=merge,
        projector=steps,
        names=_QWEN_NAMES,
        activation=_activation(vision["hidden_act"]),
        joint_qkv=True,
        positions="bilinear",
        position_shape=(vision["num_position_embeddings"], hidden),
        rope="halves",
        rope_theta=_theta(vision, 10_000.0),
        deepstack=deepstack,
        deepstack_projector=tuple(
            step._replace(name=f"deepstack.{{}}.{step.name}") if step.name else step for step in later
        ),
    )


def _qwen3_vl(config: Config, vision: dict[str, Any], text: Config) -> TowerSpec:
    return _qwen3_5(config, vision, text, tuple(vision.get("deepstack_visual_indexes", (8, 16, 24))))


_GEMMA4_NAMES = {
    "patch": "vision_tower.patch_embedder.input_proj",
    "positions": "vision_tower.patch_embedder.position_embedding_table",
    "standard.bias": "vision_tower.std_bias",
    "standard.weight": "vision_tower.std_scale",
    "projection": "embed_vision.embedding_projection",
} | _layer_names(
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


def _gemma4(config: Config, vision: dict[str, Any], text: Config) -> TowerSpec:
    vision = _GEMMA4 | vision
    hidden, heads = vision["hidden_size"], vision["num_attention_heads"]
    if vision["num_key_value_heads"] != heads:
        raise CallboardError(f"The image encoder has {vision['num_key_value_heads']} key heads; supported are {heads}.")
    standard = (Step("standard", "standard", (hidden,), True),)
    return TowerSpec(
        **_sizes(vision, text) | {"head_dim": vision["head_dim"]},
        merge=vision["pooling_kernel_size"],
        projector=(
            Step("mean"),
            Step("root"),
            *(standard if vision["standardize"] else ()),
            Step("rms", eps=vision["rms_norm_eps"]),
            Step("linear", "projection", (text["hidden_size"], hidden)),
        ),
        names=_GEMMA4_NAMES,
        activation=_activation(vision["hidden_activation"]),
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
        rope_theta=_theta(vision, 100.0),
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        doubles_pixels=True,
    )


def _last_layer(config: Config, num_layers: int) -> int:
    """Return how many layers precede the projector."""
    feature = config.get("vision_feature_layer", -1)
    if not isinstance(feature, int) or not -num_layers <= feature <= num_layers:
        raise CallboardError(f"The model's vision_feature_layer is {feature}; supported is one of its layers.")
    return feature if feature >= 0 else num_layers + 1 + feature


def _theta(vision: dict[str, Any], default: float) -> float:
    rope = vision.get("rope_parameters") or {}
    return float(rope.get("rope_theta") or vision.get("rope_theta") or default)


_TOWERS: dict[str, Callable[[Config, dict[str, Any], Config], TowerSpec]] = {
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma4ForConditionalGeneration": _gemma4,
    "Idefics3ForConditionalGeneration": _idefics3,
    "InternVLForConditionalGeneration": _internvl,
    "Lfm2VlForConditionalGeneration": _lfm2,
    "Mistral3ForConditionalGeneration": _mistral3,
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": _qwen3_vl,
    "Qwen3_5ForConditionalGeneration": _qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5,
    "SmolVLMForConditionalGeneration": _idefics3,
}
