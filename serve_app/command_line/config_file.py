"""`--config FILE`: read the flags of a command from a YAML or TOML file."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from runtime.base.types import CallboardError

_MODEL = "model"  # the positional argument
_MODELS = "models"  # a list of models with their own flags
_NOT_IN_FILES = ("config", "help")


def read_words(
    path: str, flags: Mapping[str, argparse.Action], of_models: Collection[str] = ()
) -> tuple[list[str], list[list[str]]]:
    """Return a command line's words with a file's values, and the words for each entry in `models`.

    `flags` are the command's flags by name; entries may have `of_models`. Raises CallboardError if the file cannot
    be read, or if it has an unknown name."""
    found = _read(path)
    entries = found.pop(_MODELS, []) if of_models else []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CallboardError(f"{path} has models, which must be a list; each entry has a model and its flags")
    own = {name: action for name, action in flags.items() if action.dest in of_models}
    words = _all_words(path, found, flags, "a flag")
    return words, [_all_words(path, entry, own, "a flag of one model") for entry in entries]


def _all_words(path: str, values: dict[str, Any], flags: Mapping[str, argparse.Action], what: str) -> list[str]:
    words, model = [], []
    for key, value in values.items():
        name = str(key).replace("_", "-")
        if name == _MODEL and isinstance(value, str):
            model = ["--", value]
        elif name not in flags or name in _NOT_IN_FILES:
            near = difflib.get_close_matches(name, {*flags, _MODEL}.difference(_NOT_IN_FILES), 1)
            raise CallboardError(
                f"{path} has {key!r}, which is not {what}" + (f"; did you mean {near[0]}?" if near else "")
            )
        elif value is not None:
            words += _words(path, name, value, flags[name])
    return words + model


def _read(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise CallboardError(f"--config {path} cannot be read: {reason}") from e
    read, fault, form = _toml() if path.endswith(".toml") else _yaml()
    try:
        found = read(text)
    except fault as e:
        raise CallboardError(f"--config {path} is not {form}: {' '.join(str(e).split())}") from e
    if not isinstance(found, dict | None):
        raise CallboardError(f"--config {path} must hold a flag's name and its value in each line")
    return found or {}


def _toml() -> tuple[Callable[[str], Any], type[Exception], str]:
    import tomllib

    return tomllib.loads, tomllib.TOMLDecodeError, "TOML"


def _yaml() -> tuple[Callable[[str], Any], type[Exception], str]:
    import yaml

    return yaml.safe_load, yaml.YAMLError, "YAML"


def _words(path: str, name: str, value: Any, action: argparse.Action) -> list[str]:
    if isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise CallboardError(f"{path} has {value!r} for {name}; it must be true or false")
        return [f"--{name}" if value else f"--no-{name}"]
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not isinstance(action, argparse._AppendAction):
        raise CallboardError(f"{path} has a list for {name}, which takes one value")
    for each in values:
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            raise CallboardError(f"{path} has {each!r} for {name}; it must be a text or a number")
    return [f"--{name}={each}" for each in values]
