"""Folders of draft heads, told from folders of models without torch."""

from __future__ import annotations

import json
import re
from pathlib import Path

from runtime.base.types import CallboardError
from runtime.loading.folder import read_json, weight_files

_HEADS = re.compile("eagle|dflash|dspark|medusa", re.IGNORECASE)
_FIELDS = ("speculators_model_type", "draft_vocab_size", "eagle_config", "dflash_config", "medusa_num_heads")
_MOST_LAYERS = 4  # layers of an EAGLE-1 head, whose config.json is a small Llama's


def is_head_folder(path: Path) -> bool:
    """Return True if a folder's config.json describes a draft head, not a model.

    EAGLE-1 heads have a Llama's config; their file has the tensor fc.weight."""
    if not (path / "config.json").is_file():
        return False
    config = read_json(path / "config.json")
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    if any(config.get(field) is not None for field in _FIELDS) or _HEADS.search(name):
        return True
    layers = config.get("num_hidden_layers")
    is_small = isinstance(layers, int) and layers <= _MOST_LAYERS
    return (
        name == "LlamaForCausalLM" and is_small and not _tensor_names(path).isdisjoint({"fc.weight", "model.fc.weight"})
    )


def _tensor_names(folder: Path) -> set[str]:
    """The tensors in a folder's safetensors files; empty if their headers cannot be read, which loading reports."""
    names = set[str]()
    try:
        for path in weight_files(folder):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                names |= json.loads(file.read(min(size, path.stat().st_size))).keys()
    except (CallboardError, OSError, ValueError, AttributeError):
        return set()
    return names
