"""Each family's ImageRule, read from a model folder's files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtime.base.types import CallboardError
from runtime.media.resize import Area, Budget, GridTiles, LongestEdge, Square, SquareGrid, SquareTiles
from runtime.media.rule import ImageMarks, ImageRule, Resize

Json = Mapping[str, Any]
_Family = Callable[[Json, Json, Json], ImageRule]  # takes a config, its vision_config and its processor
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
    unit = _count(vision, "patch_size", 14) * _count(config, "spatial_merge_size", 2)
    largest = _count(vision, "image_size", 1540)
    resize = LongestEdge(unit, min(_edge(processor, "size", "longest_edge", largest), largest), largest)
    defaults = {**_CLIP, "resample": _BICUBIC}
    return _rule("pixtral", config, processor, 10, unit, resize, defaults, row_break="[IMG_BREAK]", end="[IMG_END]")


def _idefics3(config: Json, vision: Json, processor: Json) -> ImageRule:
    unit = _count(vision, "patch_size", 32) * _count(config, "scale_factor", 2)
    tile = _edge(processor, "max_image_size", "longest_edge", _count(vision, "image_size", 224))
    longest = _edge(processor, "size", "longest_edge", 4 * tile)
    resize = SquareTiles(tile, longest, (tile // unit) ** 2, processor.get("do_image_splitting", True))
    fake = "<fake_token_around_image>"
    return _rule(
        "idefics3", config, processor, 128257, unit, resize, {**_HALF, "resample": _LANCZOS},
        begin=f"{fake}<global-img>", tile=fake + "<row_{row}_col_{column}>", row_end="\n",
        thumbnail=f"\n{fake}<global-img>", end=fake,
    )  # fmt: skip


def _qwen(token_id: int, patch: int, means: Json, least: int, most: int) -> _Family:
    def family(config: Json, vision: Json, processor: Json) -> ImageRule:
        unit = _count(vision, "patch_size", patch) * _count(vision, "spatial_merge_size", 2)
        bounds = [
            processor.get(name) or _edge(processor, "size", edge, default)
            for name, edge, default in (("min_pixels", "shortest_edge", least), ("max_pixels", "longest_edge", most))
        ]
        defaults = {**means, "resample": _BICUBIC}
        return _rule("qwen", config, processor, token_id, unit, Area(unit, bounds[0], bounds[1]), defaults)

    return family


def _glm(config: Json, vision: Json, processor: Json) -> ImageRule:
    unit = _count(vision, "patch_size", 14) * _count(vision, "spatial_merge_size", 2)
    frames = _count(vision, "temporal_patch_size", 2)  # the bounds count copies of a picture
    least, most = (
        _edge(processor, "size", "shortest_edge", 112**2),
        _edge(processor, "size", "longest_edge", 28**2 * 15_000),
    )
    resize = Area(unit, -(-least // frames), most // frames, enlarge=True)
    token_id = 151_363 if config["model_type"] == "glm4v_moe" else 151_343
    return _rule("glm", config, processor, token_id, unit, resize, {**_CLIP, "resample": _BICUBIC})


def _gemma3(config: Json, vision: Json, processor: Json) -> ImageRule:
    side = _edge(processor, "size", "height", _count(vision, "image_size", 224))
    unit = side // math.isqrt(_count(config, "mm_tokens_per_image", 256))
    return _rule(
        "gemma3", config, processor, 262_144, unit, Square(side), {**_HALF, "resample": _BILINEAR},
        mark=_token_id(config, "boi", 255_999), begin=_token_id(config, "boi", 255_999),
        end=_token_id(config, "eoi", 256_000), newlines="\n\n",
    )  # fmt: skip


def _gemma4(config: Json, vision: Json, processor: Json) -> ImageRule:
    patch, pool = _count(vision, "patch_size", 16), _count(vision, "pooling_kernel_size", 3)
    resize = Budget(patch, pool, _count(processor, "max_soft_tokens", 280))
    return _rule(
        "gemma4", config, processor, 258_880, patch * pool, resize,
        {"image_mean": (0.0,) * 3, "image_std": (1.0,) * 3, "resample": _BICUBIC},
        begin=_token_id(config, "boi", 255_999), end=_token_id(config, "eoi", 258_882),
    )  # fmt: skip


def _lfm2(config: Json, vision: Json, processor: Json) -> ImageRule:
    unit = _count(vision, "patch_size", 16) * _count(config, "downsample_factor", 2)
    split = processor.get("do_image_splitting", True)
    resize = GridTiles(
        unit,
        _count(processor, "min_image_tokens", 64),
        _count(processor, "max_image_tokens", 256),
        _count(processor, "tile_size", 512),
        _count(processor, "min_tiles", 2) if split else 1,
        _count(processor, "max_tiles", 10) if split else 1,
        processor.get("max_pixels_tolerance", 2.0),
        processor.get("use_thumbnail", True),
    )
    return _rule(
        "lfm2", config, processor, 396, unit, resize, {**_HALF, "resample": _BILINEAR},
        begin="<|image_start|>", end="<|image_end|>", tiles_begin="<|image_start|>",
        tile="<|img_row_{row}_col_{column}|>", thumbnail="<|img_thumbnail|>",
    )  # fmt: skip


def _internvl(config: Json, vision: Json, processor: Json) -> ImageRule:
    tile = _edge(processor, "size", "height", _count(vision, "image_size", 448))
    unit = int(_count(vision, "patch_size", 14) / config.get("downsample_ratio", 0.5))
    max_tiles = _count(processor, "max_patches", 12) if processor.get("crop_to_patches", True) else 1
    resize = SquareGrid(tile, (tile // unit) ** 2, _count(processor, "min_patches", 1), max_tiles)
    return _rule(
        "internvl", config, processor, 151_667, unit, resize, {**_CLIP, "resample": _BICUBIC},
        begin="<img>", tiles_begin="<img>", end="</img>",
    )  # fmt: skip


def _edge(processor: Json, name: str, edge: str, default: int) -> int:
    return _count(processor.get(name) or {}, edge, default)


def _count(fields: Json, name: str, default: int) -> int:
    """Return a number above 0. Of a list, which has a square's sides, it is the first."""
    found = fields.get(name) or default
    number = int(found[0] if isinstance(found, list) else found)
    if number < 1:
        raise ValueError(f"{name} is {number}")
    return number


_QWEN2 = _qwen(151_655, 14, _CLIP, 56**2, 28**2 * 1280)
_QWEN3 = _qwen(151_655, 16, _HALF, 65_536, 16_777_216)
_QWEN35 = _qwen(248_056, 16, _HALF, 65_536, 16_777_216)
_FAMILIES: dict[str, _Family] = {  # key: a config.json's model_type
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "glm46v": _glm,
    "glm4v": _glm,
    "glm4v_moe": _glm,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "lfm2_vl": _lfm2,
    "mistral3": _pixtral,
    "qwen2_5_vl": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen3_5": _QWEN35,
    "qwen3_5_moe": _QWEN35,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "smolvlm": _idefics3,
}
