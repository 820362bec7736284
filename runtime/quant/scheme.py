"""Schemes: how a checkpoint's config describes one quantized weight. This module does not import torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.base.types import CallboardError


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """How one weight is stored: number = (value - zero point) * scale."""

    layout: str  # its tensors, and where values lie in them: a key in runtime.quant.model_formats.LAYOUTS
    encoding: str  # the values' meaning: a key in runtime.quant.encodings.ENCODINGS
    scale_rows: int = 1  # weight rows that share a scale; 0 for all
    group_size: int = 0  # columns that share a scale; 0 for all
    symmetric: bool = True  # lacks zero points
    reordered: bool = False  # a group's columns need not be neighbours; a tensor holds each column's group
    dequantized: bool = False  # dense on the device, even if it has products for the encoding
    scale_dtype: str = "float32"  # a dtype that holds all scales and zero points
    value_bits: int = 0  # bits of a value, if fewer than the encoding has; 0 for all
    super_size: int = 0  # columns with a common factor for their scales; 0 without factors


# (our parameter, its module in the checkpoint) -> its scheme, or None if it is not quantized. Example arguments:
# ("head", "lm_head") and ("layers.3.q.weight", "model.layers.3.self_attn.q_proj").
Rule = Callable[[str, str], QuantizationScheme | None]
Parser = Callable[[Mapping[str, Any]], Rule]  # takes a quantization_config


def refusal(key: str, value: object, known: str) -> CallboardError:
    """The error for a key with a value that this reader does not support."""
    return CallboardError(f"The model's quantization_config has {key} {str(value)[:60]!r}; {known}.")


def group_size_of(config: Mapping[str, Any], key: str) -> int:
    """The columns that share a scale; 0 for all, which configs express as -1 or by leaving the key out."""
    value = config.get(key)
    if value in (None, -1):
        return 0
    if type(value) is not int or value <= 0:
        raise refusal(key, value, "it must be a positive whole number, or -1 for whole rows")
    return value


def named_by(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that is true for modules in a config's list of unquantized modules.

    An entry is the name of the module or an enclosing one, its last parts, or a regular expression. Models with many
    experts have tens of thousands of modules and hundreds of entries, so all entries become one expression."""
    if not patterns:
        return lambda module: False
    whole = compiled("|".join(f"(?:{pattern.removeprefix('re:')})" for pattern in patterns), r"(?:(?<=\.)|(?=\.|$))")
    return lambda module: module.endswith(tuple(patterns)) or whole.match(module) is not None


def compiled(expression: str, end: str = "") -> re.Pattern[str]:
    """A regular expression of a config."""
    try:
        return re.compile(f"(?:{expression}){end}" if end else expression)
    except re.error as e:
        raise refusal("the pattern", expression, f"it is not a regular expression ({e})") from e


def strings(config: Mapping[str, Any], key: str) -> list[str]:
    """A list of strings; empty if the key is missing or null."""
    value = config.get(key) or []
    if not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
        raise refusal(key, value, "it must be a list of names")
    return value


def block_size(config: Mapping[str, Any], key: str) -> tuple[int, int]:
    """The rows and columns of a block that shares a scale."""
    size = config.get(key)
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    raise refusal(key, size, "it must be two positive whole numbers, such as [128, 128]")
