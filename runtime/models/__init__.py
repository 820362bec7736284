"""Which architectures run, and the spec of a checkpoint's config."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from runtime.core.types import CallboardError
from runtime.models import llama, qwen
from runtime.models.spec import DecoderSpec

FAMILIES: dict[str, ModuleType] = {  # each with decoder_spec(config) and NAMES
    "LlamaForCausalLM": llama,
    "Qwen2ForCausalLM": qwen,
    "Qwen3ForCausalLM": qwen,
}


def describe(config: Mapping[str, Any]) -> tuple[DecoderSpec, dict[str, str]]:
    """The spec of a config.json, and the names of its checkpoint's tensors (see llama.NAMES).

    Raises CallboardError if the architecture, or a variant that the config asks for, is not supported."""
    name = (config.get("architectures") or [None])[0]
    if name not in FAMILIES:
        raise CallboardError(f"The model's architecture is {name}; supported are {', '.join(sorted(FAMILIES))}.")
    family = FAMILIES[name]
    try:
        return family.decoder_spec(config), family.NAMES
    except KeyError as e:
        raise CallboardError(f"The model's config.json lacks {e.args[0]}, which {name} needs.") from e
