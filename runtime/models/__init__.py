"""Which architectures run, and the spec of a checkpoint's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from runtime.core.types import CallboardError
from runtime.models import llama, qwen
from runtime.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture as people know it."""

    models: str  # the published models that it stands for
    module: ModuleType  # with decoder_spec(config) and NAMES
    example: str  # a model of it on the Hugging Face hub
    verified: str  # what its answers were compared with


_TINY = "random weights, against transformers"

FAMILIES: dict[str, Family] = {  # by the name in a config.json's `architectures`
    "LlamaForCausalLM": Family(
        "Llama 2, 3, 3.1, 3.2; SmolLM2",
        llama,
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        f"SmolLM2-135M's texts and perplexity; {_TINY}",
    ),
    "Qwen2ForCausalLM": Family("Qwen2, Qwen2.5", qwen, "Qwen/Qwen2.5-0.5B-Instruct", _TINY),
    "Qwen3ForCausalLM": Family("Qwen3", qwen, "Qwen/Qwen3-0.6B", _TINY),
}


def describe(config: Mapping[str, Any]) -> tuple[DecoderSpec, dict[str, str]]:
    """The spec of a config.json, and the names of its checkpoint's tensors (see llama.NAMES).

    Raises CallboardError if the architecture, or a variant that the config asks for, is not supported."""
    name = (config.get("architectures") or [None])[0]
    if name not in FAMILIES:
        raise CallboardError(f"The model's architecture is {name}; supported are {', '.join(sorted(FAMILIES))}.")
    family = FAMILIES[name].module
    try:
        return family.decoder_spec(config), family.NAMES
    except KeyError as e:
        raise CallboardError(f"The model's config.json lacks {e.args[0]}, which {name} needs.") from e
