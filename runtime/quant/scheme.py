"""Schemes: how a checkpoint stores the weight of one linear map, as its config says. Torch is not imported here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.core.types import CallboardError


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one weight is stored: a number is code * scale, less a minimum if there are zero points."""

    layout: str  # which tensors there are, and where codes lie in them: a key of runtime.quant.formats.LAYOUTS
    values: str  # what codes stand for: a key of runtime.quant.forms.FORMS
    rows: int = 1  # rows of the weight that share a scale; 0: all
    columns: int = 0  # columns that share a scale; 0: all
    symmetric: bool = True  # the codes have no zero points
    reordered: bool = False  # the columns of a group need not be neighbours: a tensor has the group of each


# A function of our parameter ("head", "layers.3.q.weight") and of the name of its module in the checkpoint
# ("lm_head", "model.layers.3.self_attn.q_proj"), which returns None if that is stored as plain numbers.
Rule = Callable[[str, str], Scheme | None]
Parser = Callable[[Mapping[str, Any]], Rule]  # of a quantization_config


def refusal(key: str, value: object, known: str) -> CallboardError:
    """The error of a key that asks for what cannot be read."""
    return CallboardError(f"The model's quantization_config has {key} {str(value)[:60]!r}; {known}.")


def group_size(config: Mapping[str, Any], key: str) -> int:
    """The columns that share a scale; 0 is all of them, which configs say by -1 or by nothing."""
    value = config.get(key)
    if value in (None, -1):
        return 0
    if type(value) is not int or value <= 0:
        raise refusal(key, value, "it must be a positive whole number, or -1 for whole rows")
    return value


def names_module(patterns: Iterable[str], module: str) -> bool:
    """True if one of the patterns, as lists of modules that stay unquantized have them, stands for the module.

    A pattern is the name of the module or of one around it, its last parts, or a regular expression."""
    return any(
        module.endswith(pattern) or matches(pattern.removeprefix("re:") + r"(?:(?<=\.)|(?=\.|$))", module)
        for pattern in patterns
    )


def matches(expression: str, module: str) -> bool:
    """True if a regular expression of a config fits the beginning of a module's name."""
    try:
        return re.match(expression, module) is not None
    except re.error as e:
        raise refusal("the pattern", expression, f"it is no regular expression ({e})") from e


def strings(config: Mapping[str, Any], key: str) -> list[str]:
    """A list of strings, which may be missing or null."""
    value = config.get(key) or []
    if not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
        raise refusal(key, value, "it must be a list of names")
    return value
