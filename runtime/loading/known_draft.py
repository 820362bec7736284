"""Which drafts are heads: decided by their config.json, before an engine starts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.base.config import HEAD, EngineConfig
from runtime.base.types import CallboardError
from runtime.loading.folder import read_json, weight_files
from runtime.loading.resolve import resolve
from runtime.loading.sources.names import CloudName, HubName, parse

_HEADS = re.compile("eagle|dflash|dspark|medusa", re.IGNORECASE)
_HEAD_FIELDS = ("speculators_model_type", "draft_vocab_size", "eagle_config", "dflash_config", "medusa_num_heads")
_MOST_HEAD_LAYERS = 4  # an EAGLE-1 head has the config.json of a small Llama


def with_known_draft(config: EngineConfig) -> EngineConfig:
    """Return the settings with HEAD before a draft that is a head. Then no draft model is started.

    Of a hub's or a bucket's draft it fetches the small files. Raises CallboardError if that fails."""
    if not config.has_draft_model or not _is_head(config.draft or ""):
        return config
    return replace(config, draft=f"{HEAD}{config.draft}")


def _is_head(draft: str) -> bool:
    path = Path(draft).expanduser()
    if draft.startswith("pypi:") or path.exists() or not isinstance(parse(draft), HubName | CloudName):
        return is_head_folder(path)
    path = resolve(draft, progress=False, weights=False)
    if (path / "config.json").is_file() and _may_be_eagle1(read_json(path / "config.json")):
        path = resolve(draft, progress=False)
    return is_head_folder(path)


def is_head_folder(path: Path) -> bool:
    """Return True if a folder's config.json describes a draft head, not a model.

    EAGLE-1 heads have a Llama's config; their file has the tensor fc.weight."""
    if not (path / "config.json").is_file():
        return False
    config = read_json(path / "config.json")
    if any(config.get(field) is not None for field in _HEAD_FIELDS) or _HEADS.search(_architecture(config)):
        return True
    return _may_be_eagle1(config) and not _tensor_names(path).isdisjoint({"fc.weight", "model.fc.weight"})


def _may_be_eagle1(config: Mapping[str, Any]) -> bool:
    layers = config.get("num_hidden_layers")
    return _architecture(config) == "LlamaForCausalLM" and isinstance(layers, int) and layers <= _MOST_HEAD_LAYERS


def _architecture(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


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
