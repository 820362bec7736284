"""The pooling of a model, from sentence-transformers' modules.json and its folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from runtime.base.model.pooling import Pooling
from runtime.base.types import CallboardError
from runtime.loading.folder import read_json

_KINDS = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_OF_MATRYOSHKA = "Qwen3"  # its embedding models are trained for it, but their files omit it


class PoolingFiles(NamedTuple):
    """The pooling in the files of a model."""

    pooling: Pooling
    # The score is the first token's logit, minus the second token's logit if there are two.
    label_ids: tuple[int, ...] = ()


def read_pooling(folder: Path, config: Mapping[str, Any]) -> PoolingFiles | None:
    """Read the pooling of a model; None without a modules.json, or with one that keeps the hidden states.

    Raises CallboardError for an unsupported module."""
    modules = _modules(folder) if (folder / "modules.json").exists() else []
    pooling: Pooling | None = None
    for kind, path in modules:
        if kind == "Pooling":
            pooling = Pooling(_pooling_kind(path / "config.json"), cuts_dimensions=_is_matryoshka(config))
        elif kind == "LogitScore":
            ids = read_json(path / "config.json")
            found = tuple(ids[name] for name in ("true_token_id", "false_token_id") if ids.get(name) is not None)
            if not found or not all(type(i) is int for i in found):
                raise CallboardError(f"{path / 'config.json'} names no true_token_id; it needs that token's id.")
            return PoolingFiles(Pooling("last", num_labels=1), found)
        elif kind == "Normalize" and pooling is not None:
            pooling = Pooling(pooling.kind, True, pooling.cuts_dimensions)
        elif kind != "Transformer":
            raise CallboardError(
                f"{folder / 'modules.json'} has a module {kind}, which is not supported; start the model with "
                "pooling=last or pooling=mean for vectors without it, or with pooling=none."
            )
    return None if pooling is None else PoolingFiles(pooling)


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Return the modules in order: the last part of each type's name, and its folder."""
    path = folder / "modules.json"
    try:
        return [(str(m["type"]).rpartition(".")[2], folder / str(m["path"])) for m in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise CallboardError(f"{path} is no list of modules with a type and a path each ({e!r}).") from e


def _pooling_kind(path: Path) -> Any:
    """Return the mode in a pooling module's config.json, given as a name or by a flag."""
    config = read_json(path)
    modes = [name.removeprefix("pooling_mode_") for name, value in config.items() if value is True]
    modes = [mode for mode in modes if f"pooling_mode_{mode}" in config]
    if isinstance(config.get("pooling_mode"), str):
        modes = [config["pooling_mode"]]
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise CallboardError(
            f"{path} pools by {', '.join(modes) or 'nothing'}; supported are lasttoken and mean_tokens."
        )
    return _KINDS[modes[0]]


def _is_matryoshka(config: Mapping[str, Any]) -> bool:
    name = str((config.get("architectures") or [""])[0])
    return bool(config.get("is_matryoshka") or config.get("matryoshka_dimensions")) or name.startswith(_OF_MATRYOSHKA)
