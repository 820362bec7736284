"""Each family's ImageRule, read from a model folder's files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtime.base.types import CallboardError
from runtime.media.resize import LongestEdge, SquareTiles
from runtime.media.rule import ImageMarks, ImageRule, Resize

Json = Mapping[str, Any]
_CLIP = {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)}
_HALF = {"image_mean": (0.5, 0.5, 0.5), "image_std": (0.5, 0.5, 0.5)}
_LANCZOS, _BILINEAR, _BICUBIC = 1, 2, 3


def image_rule(folder: Path) -> ImageRule | None:
    """Return the rule of a model folder; None for a folder without one, and for a model that takes no images."""
    config = _json(folder / "config.json")
    processor = _json(folder / "processor_config.json")
    files = {**_json(folder / "preprocessor_config.json"), **(processor.get("image_processor") or {})}
    return rule_of(config, files)


def rule_of(config: Json, processor: Json) -> ImageRule | None:
    """Return the rule of a model's config and its image processor's settings, which may be empty."""
    family = _FAMILIES.get(config.get("model_type", ""))
    if family is None or not config.get("vision_config"):
        return None
    try:
        return family(config, config["vision_config"], processor)
    except (KeyError, TypeError, ValueError) as e:
        raise CallboardError(
            f"The model's config.json or preprocessor_config.json describes no {config['model_type']} images: {e!r}."
        ) from None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as e:
        raise CallboardError(f"{path.name} is not valid JSON: {e}.") from None
    return found if isinstance(found, dict) else {}


def _rule(
    name: str, config: Json, processor: Json, default_token_id: int, unit: int, resize: Resize, defaults: Json,
    mark: int | None = None, **marks: Any,
) -> ImageRule:  # fmt: skip
    found = {**defaults, **{key: value for key, value in processor.items() if value is not None}}
    token_id = _token_id(config, "image", default_token_id)
    return ImageRule(
        name,
        token_id,
        unit,
        resize,
        ImageMarks(token_id if mark is None else mark, **marks),
        tuple(found["image_mean"]),
        tuple(found["image_std"]),
        int(found["resample"]),
    )


def _token_id(config: Json, name: str, default: int) -> int:
    return int(config.get(f"{name}_token_id", config.get(f"{name}_token_index", default)))


def _pixtral(config: Json, vision: Json, processor: Json) -> ImageRule:
    unit = vision.get("patch_size", 14) * config.get("spatial_merge_size", 2)
    largest = vision.get("image_size", 1540)
    longest = (processor.get("size") or {}).get("longest_edge", largest)
    resize = LongestEdge(unit, min(longest, largest), largest)
    defaults = {**_CLIP, "resample": _BICUBIC}
    return _rule("pixtral", config, processor, 10, unit, resize, defaults, row_break="[IMG_BREAK]", end="[IMG_END]")


def _idefics3(config: Json, vision: Json, processor: Json) -> ImageRule:
    unit = vision.get("patch_size", 32) * config.get("scale_factor", 2)
    tile: int = (processor.get("max_image_size") or {}).get("longest_edge", vision.get("image_size", 224))
    longest = (processor.get("size") or {}).get("longest_edge", 4 * tile)
    resize = SquareTiles(tile, longest, (tile // unit) ** 2, processor.get("do_image_splitting", True))
    fake = "<fake_token_around_image>"
    return _rule(
        "idefics3", config, processor, 128257, unit, resize, {**_HALF, "resample": _LANCZOS},
        begin=f"{fake}<global-img>", tile=fake + "<row_{row}_col_{column}>", row_end="\n",
        thumbnail=f"\n{fake}<global-img>", end=fake,
    )  # fmt: skip


_FAMILIES: dict[str, Callable[[Json, Json, Json], ImageRule]] = {  # key: a config.json's model_type
    "idefics3": _idefics3,
    "mistral3": _pixtral,
    "smolvlm": _idefics3,
}
