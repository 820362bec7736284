"""GGUF: the type of each tensor, which the file states and its reader puts where a config.json says such things.

Types that are not named here are widened by the `gguf` package as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.quant.scheme import Rule, Scheme

_TYPES = {
    "Q8_0": Scheme("gguf Q8_0", "int8", columns=32),
    "Q4_0": Scheme("gguf Q4_0", "int4", columns=32),
    "Q4_1": Scheme("gguf Q4_1", "int4", columns=32, symmetric=False),
    "Q4_K": Scheme("gguf Q4_K", "int4", columns=32, symmetric=False),
    "Q5_K": Scheme("gguf Q5_K", "int8", columns=32, symmetric=False),
    "Q6_K": Scheme("gguf Q6_K", "int8", columns=16),
}


def parse(config: Mapping[str, Any]) -> Rule:
    types: Mapping[str, str] = config["types"]  # of tensors by name
    return lambda parameter, module: _TYPES.get(types.get(f"{module}.weight", ""))
