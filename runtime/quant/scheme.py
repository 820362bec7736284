"""Schemes: how a checkpoint stores the weight of one linear map, as its config says. Torch is not imported here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.spec.types import CallboardError


@dataclass(frozen=True, slots=True)
class QuantizationScheme:
    """How one weight is stored: a number is code * scale, less a minimum if there are zero points."""

    layout: str  # which tensors there are, and where codes lie in them: a key of runtime.quant.model_formats.LAYOUTS
    encoding: str  # what codes stand for: a key of runtime.quant.encodings.FORMS
    scale_rows: int = 1  # rows of the weight that share a scale; 0: all
    group_size: int = 0  # columns that share a scale; 0: all
    symmetric: bool = True  # the codes have no zero points
    reordered: bool = False  # the columns of a group need not be neighbours: a tensor has the group of each
    dequantized: bool = False  # plain numbers on the device, whatever multiplies with such codes there


# A function of our parameter ("head", "layers.3.q.weight") and of the name of its module in the checkpoint
# ("lm_head", "model.layers.3.self_attn.q_proj"), which returns None if that is stored as plain numbers.
Rule = Callable[[str, str], QuantizationScheme | None]
Parser = Callable[[Mapping[str, Any]], Rule]  # of a quantization_config


def refusal(key: str, value: object, known: str) -> CallboardError:
    """The error of a key that asks for what cannot be read."""
    return CallboardError(f"The model's quantization_config has {key} {str(value)[:60]!r}; {known}.")


def group_size_of(config: Mapping[str, Any], key: str) -> int:
    """The columns that share a scale; 0 is all of them, which configs say by -1 or by nothing."""
    value = config.get(key)
    if value in (None, -1):
        return 0
    if type(value) is not int or value <= 0:
        raise refusal(key, value, "it must be a positive whole number, or -1 for whole rows")
    return value


def named_by(patterns: Sequence[str]) -> Callable[[str], bool]:
    """A function that says if one of the patterns, as lists of modules that stay unquantized have them, means a module.

    A pattern is the name of the module or of one around it, its last parts, or a regular expression. Models with many
    experts have tens of thousands of modules and hundreds of patterns, so all are one expression."""
    if not patterns:
        return lambda module: False
    whole = compiled("|".join(f"(?:{pattern.removeprefix('re:')})" for pattern in patterns), r"(?:(?<=\.)|(?=\.|$))")
    return lambda module: module.endswith(tuple(patterns)) or whole.match(module) is not None


def compiled(expression: str, end: str = "") -> re.Pattern[str]:
    """A regular expression of a config."""
    try:
        return re.compile(f"(?:{expression}){end}" if end else expression)
    except re.error as e:
        raise refusal("the pattern", expression, f"it is no regular expression ({e})") from e


def strings(config: Mapping[str, Any], key: str) -> list[str]:
    """A list of strings, which may be missing or null."""
    value = config.get(key) or []
    if not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
        raise refusal(key, value, "it must be a list of names")
    return value


def block_size(config: Mapping[str, Any], key: str) -> tuple[int, int]:
    """The rows and columns that share a scale."""
    size = config.get(key)
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    raise refusal(key, size, "it must be two positive whole numbers, such as [128, 128]")
