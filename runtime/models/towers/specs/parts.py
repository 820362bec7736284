"""What several families share: names, sizes and activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.base.model.tower_spec import Step
from runtime.base.types import CallboardError

Config = Mapping[str, Any]
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PROJECTOR_NAMES = {part: f"multi_modal_projector.{part}" for part in ("linear_1", "linear_2")}
_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "quick_gelu": "quick_gelu"}


def activation(name: str) -> str:
    """Return an activation's name in `towers/projectors.py`. Raises CallboardError for an unknown one."""
    if name not in _ACTIVATIONS:
        raise CallboardError(f"The image encoder's activation is {name!r}; supported are {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def with_squares(vision: Config) -> dict[str, Any]:
    """Return a vision_config with numbers for its sides. Raises CallboardError for pictures other than squares."""
    found = dict(vision)
    for name in {"image_size", "patch_size"} & vision.keys():
        sides = vision[name] if isinstance(vision[name], list | tuple) else [vision[name]]
        if len(set(sides)) != 1:
            raise CallboardError(f"The image encoder's {name} is {sides}; supported are squares.")
        found[name] = sides[0]
    return found


def layer_names(layer: str, **parts: str) -> dict[str, str]:
    """Return the tensors of a layer's parts. q, k and v share a name with ? for their letter."""
    if "qkv_proj" in parts:
        own = parts.pop("qkv_proj")
        parts |= {part: own.replace("?", part) for part in ("q", "k", "v")}
    return {f"layers.{{}}.{part}": layer + name for part, name in parts.items()}


def sizes(vision: dict[str, Any], text: Config) -> dict[str, Any]:
    """Return the fields that most configurations name alike."""
    hidden, heads = vision["hidden_size"], vision.get("num_attention_heads") or vision["num_heads"]
    return {
        "num_layers": vision.get("num_hidden_layers") or vision["depth"],
        "hidden_size": hidden,
        "ffn_size": vision["intermediate_size"],
        "num_heads": heads,
        "head_dim": hidden // heads,
        "out_size": text["hidden_size"],
        "patch_size": vision["patch_size"],
    }


def two_maps(config: Config, size: int, inner: int, out: int, bias: bool) -> tuple[Step, ...]:
    """Return a projector's last steps: two maps with an activation between them."""
    return (
        Step("linear", "linear_1", (inner, size), bias),
        Step(activation(config.get("projector_hidden_act", "gelu"))),
        Step("linear", "linear_2", (out, inner), bias),
    )


def last_layer(config: Config, num_layers: int) -> int:
    """Return how many layers precede the projector."""
    feature = config.get("vision_feature_layer", -1)
    if not isinstance(feature, int) or not -num_layers <= feature <= num_layers:
        raise CallboardError(f"The model's vision_feature_layer is {feature}; supported is one of its layers.")
    return feature if feature >= 0 else num_layers + 1 + feature


def theta(vision: dict[str, Any], default: float) -> float:
    """Return the base of rotary positions."""
    rope = vision.get("rope_parameters") or {}
    return float(rope.get("rope_theta") or vision.get("rope_theta") or default)
