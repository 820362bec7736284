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


def tower_spec(config: Config) -> TowerSpec | None:
    """Return the image encoder that a config.json describes; None for a model that takes no images.

    Raises CallboardError for a variant that is not supported."""
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    vision = config.get("vision_config")
    if name not in _TOWERS or not isinstance(vision, Mapping):
        return None
    return _TOWERS[name](config, vision, with_defaults(config, name))


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise CallboardError(f"The image encoder's activation is {name!r}; supported are {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def _siglip_names(tower: str) -> dict[str, str]:
    layer = f"{tower}.encoder.layers.{{}}."
    return {
        "patch": f"{tower}.embeddings.patch_embedding",
        "positions": f"{tower}.embeddings.position_embedding.weight",
        "post_norm": f"{tower}.post_layernorm",
        "layers.{}.norm1": f"{layer}layer_norm1",
        "layers.{}.norm2": f"{layer}layer_norm2",
        "layers.{}.q": f"{layer}self_attn.q_proj",
        "layers.{}.k": f"{layer}self_attn.k_proj",
        "layers.{}.v": f"{layer}self_attn.v_proj",
        "layers.{}.out": f"{layer}self_attn.out_proj",
        "layers.{}.up": f"{layer}mlp.fc1",
        "layers.{}.down": f"{layer}mlp.fc2",
    }


def _siglip(vision: Config, sizes: Config, own: Config) -> dict[str, Any]:
    """Return the fields of a SigLIP encoder: `sizes` are defaults for its config, `own` replaces fields."""
    vision = {**sizes, **vision}
    hidden, side = vision["hidden_size"], vision["image_size"] // vision["patch_size"]
    return {
        "num_layers": vision["num_hidden_layers"],
        "hidden_size": hidden,
        "ffn_size": vision["intermediate_size"],
        "num_heads": vision["num_attention_heads"],
        "head_dim": hidden // vision["num_attention_heads"],
        "patch_size": vision["patch_size"],
        "activation": _activation(vision.get("hidden_act", "gelu_pytorch_tanh")),
        "norm_eps": vision.get("layer_norm_eps", 1e-6),
        "position_shape": (side * side, hidden),
    } | dict(own)


def _idefics3(config: Config, vision: Config, text: Config) -> TowerSpec:
    merge = config.get("scale_factor", 2)
    sizes = {
        "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16,
        "image_size": 224, "patch_size": 32,
    }  # fmt: skip
    fields = _siglip(vision, sizes, {"positions": "buckets", "merge": merge, "out_size": text["hidden_size"]})
    hidden = fields["hidden_size"]
    names = _siglip_names("vision_model") | {"projection": "connector.modality_projection.proj"}
    steps = (
        Step("norm", "post_norm", (hidden,), True, fields["norm_eps"]),
        Step("blocks"),
        Step("linear", "projection", (text["hidden_size"], hidden * merge**2)),
    )
    return TowerSpec(**fields, projector=steps, names=names)


_PIXTRAL_NAMES = {
    "patch": "vision_tower.patch_conv",
    "patch_norm": "vision_tower.ln_pre",
    "layers.{}.norm1": "vision_tower.transformer.layers.{}.attention_norm",
    "layers.{}.norm2": "vision_tower.transformer.layers.{}.ffn_norm",
    **{
        f"layers.{{}}.{part}": f"vision_tower.transformer.layers.{{}}.attention.{name}_proj"
        for part, name in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o"))
    },
    **{
        f"layers.{{}}.{part}": f"vision_tower.transformer.layers.{{}}.feed_forward.{part}_proj"
        for part in ("gate", "up", "down")
    },
    "norm": "multi_modal_projector.norm",
    "merging": "multi_modal_projector.patch_merger.merging_layer",
    "linear_1": "multi_modal_projector.linear_1",
    "linear_2": "multi_modal_projector.linear_2",
}


def _mistral3(config: Config, vision: Config, text: Config) -> TowerSpec:
    sizes = {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "patch_size": 16, "hidden_act": "gelu",
    }  # fmt: skip
    vision = {**sizes, **vision}
    hidden, out, merge = vision["hidden_size"], text["hidden_size"], config.get("spatial_merge_size", 2)
    bias = config.get("multimodal_projector_bias", False)
    steps = (
        Step("rms", "norm", (hidden,), eps=text["rms_norm_eps"]),
        Step("channels"),
        Step("linear", "merging", (hidden, hidden * merge**2)),
        Step("linear", "linear_1", (out, hidden), bias),
        Step(_activation(config.get("projector_hidden_act", "gelu"))),
        Step("linear", "linear_2", (out, out), bias),
    )
    return TowerSpec(
        num_layers=_last_layer(config, vision["num_hidden_layers"]),
        hidden_size=hidden,
        ffn_size=vision["intermediate_size"],
        num_heads=vision["num_attention_heads"],
        head_dim=hidden // vision["num_attention_heads"],
        out_size=out,
        patch_size=vision["patch_size"],
        merge=merge,
        projector=steps,
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


def _last_layer(config: Config, num_layers: int) -> int:
    """Return how many layers precede the projector."""
    feature = config.get("vision_feature_layer", -1)
    if not isinstance(feature, int) or not -num_layers <= feature <= num_layers:
        raise CallboardError(f"The model's vision_feature_layer is {feature}; supported is one of its layers.")
    return feature if feature >= 0 else num_layers + 1 + feature


def _theta(vision: Config, default: float) -> float:
    rope = vision.get("rope_parameters") or {}
    return float(rope.get("rope_theta") or vision.get("rope_theta") or default)


_TOWERS: dict[str, Callable[[Config, Config, Config], TowerSpec]] = {
    "Idefics3ForConditionalGeneration": _idefics3,
    "Mistral3ForConditionalGeneration": _mistral3,
    "SmolVLMForConditionalGeneration": _idefics3,
}
