"""Which architectures run, and the spec of a checkpoint's config."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from runtime.core.types import CallboardError
from runtime.models import llama

FAMILIES: dict[str, ModuleType] = {"LlamaForCausalLM": llama}


def family_of(config: Mapping[str, Any]) -> ModuleType:
    """The family module (`decoder_spec`, `NAMES`) of a config.json; raises CallboardError if there is none."""
    names = config.get("architectures") or [None]
    if names[0] not in FAMILIES:
        raise CallboardError(f"The model's architecture is {names[0]}; supported are {', '.join(sorted(FAMILIES))}.")
    return FAMILIES[names[0]]
