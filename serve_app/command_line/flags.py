"""Flags that several commands share: how they are declared and read, and the settings made from them."""

from __future__ import annotations

import argparse
import os
import threading
import types
from collections.abc import Callable
from dataclasses import Field, fields, replace
from typing import Any, get_args, get_type_hints

from runtime.base.config import DEFAULT_MODEL, DEFAULT_MODEL_NAMES, EngineConfig, choices_of
from runtime.base.types import CallboardError, SamplingParams
from runtime.loading.sources.names import absolute
from serve_app.command_line.gpu import missing_gpu
from serve_app.command_line.parser import UsageError
from serve_app.command_line.subjects import HOME, SUBJECTS
from serve_app.durations import Duration
from serve_app.settings import HttpSettings

API_KEY = "CALLBOARD_API_KEY"


def help_of(name: str) -> str:
    return str(next(f.metadata["help"] for f in fields(EngineConfig) if f.name == name))


DEFAULT_SHOWN = f"default: {DEFAULT_MODEL_NAMES[1]}, {DEFAULT_MODEL}"


def add_model(parser: argparse.ArgumentParser) -> argparse.Action:
    what = f"{help_of('model')} ({DEFAULT_SHOWN})"
    return parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=what)


def group_of(parser: argparse.ArgumentParser, subject: str) -> argparse._ArgumentGroup:
    """Return the group of a subject's flags; the first flag creates it."""
    known = {group.title: group for group in parser._action_groups}
    return known.get(subject) or parser.add_argument_group(subject, SUBJECTS[subject].about)


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = group_of(parser, "sampling")
    what = "most tokens of output" + ("" if max_tokens else "; default: the rest of the context")
    group.add_argument("--max-tokens", type=positive, default=max_tokens, metavar="N", help=what)
    group.add_argument("--temperature", type=number, metavar="X", help="0 is greedy; default: the model's, or 0.7")
    what = "sample from this share of probability; default: the model's, or 1"
    group.add_argument("--top-p", type=number, metavar="X", help=what)
    group.add_argument("--seed", type=whole, metavar="N", help="same seed, same output; default: a random one")


def add_flags(parser: argparse.ArgumentParser, *classes: type) -> None:
    """Add a flag for each field in settings dataclasses, except the model, to its subject's group."""
    settings = {f.name: (f, kind, HOME[each]) for each in classes for f, kind in _typed_fields(each)}
    listed = {name for subject in SUBJECTS.values() for name in subject.names}
    for title, subject in SUBJECTS.items():
        own = [name for name, (*_, home) in settings.items() if home == title and name not in listed]
        for name in [name for name in subject.names if name in settings] + own:
            f, kind, _ = settings[name]
            _add_flag(group_of(parser, title), f, kind)


def _typed_fields(settings: type) -> list[tuple[Field[Any], Any]]:
    types_of = get_type_hints(settings)
    return [(f, types_of[f.name]) for f in fields(settings) if f.name != "model"]


def _add_flag(group: argparse._ArgumentGroup, f: Field[Any], kind: Any) -> None:
    flag, text = "--" + f.name.replace("_", "-"), f.metadata["help"]
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=f.default, help=text)
        return
    if kind == tuple[str, ...]:
        group.add_argument(flag, action="append", metavar="TEXT", help=text)
        return
    choices = choices_of(f, kind) or None
    if choices:
        kind = type(choices[0])
    elif isinstance(kind, types.UnionType):  # X | None
        kind = get_args(kind)[0]
        kind = whole_or_auto if kind is int else kind
    metavar = None if choices else {int: "N", whole_or_auto: "N|auto", float: "X", str: "NAME", Duration: "TIME"}[kind]
    read = {int: whole, float: number, Duration: duration}.get(kind, kind)
    group.add_argument(flag, type=read, choices=choices, default=f.default, metavar=metavar, help=text)


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number") from None


def number(text: str) -> float:
    """Any number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number") from None


def duration(text: str) -> Duration:
    """A number of seconds, with or without units."""
    try:
        return Duration(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; it must be between 1 and 65535")
    return int(text)


def at_least(least: int) -> Callable[[str], int]:
    """Return a reader of whole numbers."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least {least}")
        return int(text)

    return read


def above_zero(what: str, most: float) -> Callable[[str], float]:
    """Return a reader of numbers above 0."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} must be a number of {what} above 0")
        return value

    return read


positive, seconds = at_least(1), above_zero("seconds", threading.TIMEOUT_MAX)


def whole_or_auto(text: str) -> int | None:
    """A whole number, or None for auto: the engine chooses."""
    if text != "auto" and not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number or auto")
    return None if text == "auto" else int(text)


def keys_of_environment() -> tuple[str, ...]:
    """Return the API keys in $CALLBOARD_API_KEY, separated by commas.

    Other users can read a process's command line, but not its environment."""
    return tuple(key for text in os.environ.get(API_KEY, "").split(",") if (key := text.strip()))


def add_client_key(parser: argparse.ArgumentParser) -> None:
    """Add the key of commands that send requests to a server."""
    parser.add_argument("--api-key", metavar="KEY", help=f"of the server, if it has any; default: ${API_KEY}")


def client_key(args: argparse.Namespace) -> str | None:
    """Return the key to send: the one given, or the first of the environment."""
    return args.api_key or next(iter(keys_of_environment()), None)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the engine's settings. Raises CallboardError if a value is out of range, or for a missing GPU."""
    config: EngineConfig = checked(EngineConfig, **values(args, EngineConfig))
    if config.device == "cuda" and (missing := missing_gpu()) is not None:
        raise CallboardError(f"device is cuda, but {missing}; use device=cpu, or see `callboard doctor`.")
    return config


def values(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """Return the values that were given for a settings dataclass."""
    values = {f.name: getattr(args, f.name) for f in fields(settings)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if v is not None}


def http_settings(args: argparse.Namespace) -> HttpSettings:
    """Raises CallboardError if a value is out of range or the key file cannot be read."""
    given = {"api_key": keys_of_environment()} | values(args, HttpSettings)
    settings: HttpSettings = checked(HttpSettings, **given)
    for name in ("api_key_file", "lora_folder", "weight_folder", "batch_folder"):
        if (path := getattr(settings, name)) is not None:  # the fronts have another working directory
            changed: dict[str, Any] = {name: absolute(path)}
            settings = replace(settings, **changed)
    settings.api_keys()
    return settings


def checked(make: Callable[..., Any], **values: Any) -> Any:
    """`make(**values)`, where a value out of range is the user's."""
    try:
        return make(**values)
    except CallboardError as e:
        raise UsageError(str(e)) from None


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given fields of SamplingParams; wrong values are refused before a model is loaded."""
    names = ("max_tokens", "temperature", "top_p", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    checked(SamplingParams, **given)
    return given
