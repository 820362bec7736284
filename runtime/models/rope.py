"""RoPE as a config.json states it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.base.model.decoder_spec import RopeSpec
from runtime.base.types import CallboardError


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in `rope_scaling` (transformers 4) or `rope_parameters` (transformers 5), without nulls."""
    stated = config["rope_scaling"] or config["rope_parameters"] or {}
    return {name: value for name, value in stated.items() if value is not None}


def ropes_by_kind(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What replaces `rope_parameters` for layers that attend to all positions, and for layers with a window."""
    stated = config["rope_parameters"] or {}
    full = stated.get("full_attention") if {"full_attention", "sliding_attention"} & stated.keys() else stated
    ropes = {**(full or {}), **(config["rope_scaling"] or {})}, stated.get("sliding_attention")
    return {"rope_parameters": ropes[0], "rope_scaling": None}, {"rope_parameters": ropes[1], "rope_scaling": None}


def rope_spec(config: Mapping[str, Any]) -> RopeSpec:
    """The RoPE of a config. Raises CallboardError for a type that is not supported."""
    stated = rope_parameters(config)
    sections = stated.get("mrope_section", config.get("mrope_section"))
    is_mixed = stated.get("mrope_interleaved", config.get("mrope_interleaved"))
    if not sections:
        return _one_position(config, stated)
    if len(sections) != 3:
        raise CallboardError(f"The model's mrope_section is {sections}; it must be three numbers.")
    text = {name: value for name, value in stated.items() if value != "mrope"}
    return replace(_one_position(config, text), sections=tuple(map(int, sections)), mixed_sections=bool(is_mixed))


def _one_position(config: Mapping[str, Any], scaling: dict[str, Any]) -> RopeSpec:
    """The RoPE of text."""
    defaults = ("rope_theta", "partial_rotary_factor", "max_position_embeddings")
    rope = {**{name: config[name] for name in defaults}, **scaling}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    theta = float(rope["rope_theta"])
    partial = float(rope.get("partial_rotary_factor") or 1.0)
    most = int(rope["max_position_embeddings"])
    original = int(rope.get("original_max_position_embeddings") or most)
    match kind:
        case "default":
            return RopeSpec(theta, partial=partial)
        case "proportional":
            return RopeSpec(theta, "proportional", float(rope.get("factor") or 1.0), partial=partial)
        case "linear":
            return RopeSpec(theta, "linear", float(rope["factor"]), partial=partial)
        case "dynamic":
            return RopeSpec(theta, "dynamic", float(rope["factor"]), original_positions=most, partial=partial)
        case "llama3":
            low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
            return RopeSpec(theta, "llama3", float(rope["factor"]), low, high, original, partial)
        case "yarn":
            factor = float(rope.get("factor") or most / original)
            return RopeSpec(
                theta,
                "yarn",
                factor,
                original_positions=original,
                partial=partial,
                attention_factor=_yarn_attention_factor(rope, factor),
                beta_fast=float(rope.get("beta_fast") or 32),
                beta_slow=float(rope.get("beta_slow") or 1),
                truncate=rope.get("truncate", True),
            )
        case "longrope" | "su":
            factor = float(rope.get("factor") or most / original)
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            return RopeSpec(
                theta,
                "longrope",
                original_positions=original,
                partial=partial,
                attention_factor=float(rope.get("attention_factor") or attention_factor),
                short_factor=tuple(map(float, rope["short_factor"])),
                long_factor=tuple(map(float, rope["long_factor"])),
            )
    raise CallboardError(
        f"The model's rope type is {kind!r}; supported are default, linear, dynamic, llama3, yarn, "
        "longrope and proportional."
    )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    """arXiv 2309.00071, section 3.4; DeepSeek's two multipliers of the logarithm."""

    def scale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope["mscale"]) / scale(rope["mscale_all_dim"])
    return scale(1.0)


def context(config: Mapping[str, Any], rope: RopeSpec) -> int:
    """The model's context in positions; configs often state the one before it was extended."""
    stated = int(config["max_position_embeddings"])
    return max(stated, int(rope.original_positions * rope.factor)) if rope.type in ("dynamic", "yarn") else stated
