"""Flags that several commands share, how their values are read, and what settings are made of them."""

from __future__ import annotations

import argparse
import os
import threading
import types
from dataclasses import fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from runtime.core.config import DEFAULT_MODEL, EngineConfig
from runtime.core.types import CallboardError, SamplingParams
from serve_app.settings import HttpSettings


class UsageError(CallboardError):
    """The command line asks for something that cannot be: exit code 2."""


class Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows each flag's default once."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def help_of(name: str) -> str:
    return str(next(f.metadata["help"] for f in fields(EngineConfig) if f.name == name))


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=help_of("model"))


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = parser.add_argument_group("sampling")
    what = "most tokens of output" + ("" if max_tokens else "; default: as many as fit")
    group.add_argument("--max-tokens", type=positive, default=max_tokens, metavar="N", help=what)
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy; default: the model's, or 0.7")
    what = "sample from this share of probability; default: the model's, or 1"
    group.add_argument("--top-p", type=float, metavar="X", help=what)
    group.add_argument("--seed", type=int, metavar="N", help="same seed, same output; default: a random one")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of EngineConfig but the model."""
    policies = "each from --device on is a policy: it changes speed or memory, and tokens at most by rounding"
    add_flags(parser.add_argument_group("engine", policies), EngineConfig)


def add_flags(group: argparse._ArgumentGroup, config: type) -> None:
    """A flag for every field of a dataclass but the model."""
    types_of = get_type_hints(config)
    for f in fields(config):
        if f.name == "model":
            continue
        flag, kind, text = "--" + f.name.replace("_", "-"), types_of[f.name], f.metadata["help"]
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=f.default, help=text)
            continue
        if kind == tuple[str, ...]:
            group.add_argument(flag, action="append", metavar="TEXT", help=text)
            continue
        choices = get_args(kind) if get_origin(kind) is Literal else None
        if choices:
            kind = type(choices[0])
        elif isinstance(kind, types.UnionType):  # X | None
            kind = get_args(kind)[0]
            kind = number_or_auto if kind is int else kind
        metavar = None if choices else {int: "N", number_or_auto: "N|auto", float: "X", str: "NAME"}[kind]
        group.add_argument(flag, type=kind, choices=choices, default=f.default, metavar=metavar, help=text)


def port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port; it must be between 1 and 65535")
    return int(text)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of seconds above 0")
    return value


def number_or_auto(text: str) -> int | None:
    """auto is the default of a number that has none: the engine finds what suits."""
    if text != "auto" and not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number or auto")
    return None if text == "auto" else int(text)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    config: EngineConfig = checked(EngineConfig, **values(args, EngineConfig))
    return config


def values(args: argparse.Namespace, settings: type) -> dict[str, Any]:
    """What is given for the fields of a dataclass of settings."""
    values = {f.name: getattr(args, f.name) for f in fields(settings)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if v is not None}


def http_settings(args: argparse.Namespace) -> HttpSettings:
    """Raises CallboardError if a value is out of range or the file of keys cannot be read."""
    settings: HttpSettings = checked(HttpSettings, **values(args, HttpSettings))
    for name in ("api_key_file", "lora_folder", "batch_folder"):
        if (path := getattr(settings, name)) is not None:  # the fronts have another working directory
            settings = replace(settings, **{name: os.path.abspath(path)})
    settings.api_keys()
    return settings


def checked(make: type, **values: Any) -> Any:
    """`make(**values)`, where a value out of range is the user's."""
    try:
        return make(**values)
    except CallboardError as e:
        raise UsageError(str(e)) from None


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that are given; wrong ones are told before a model is loaded."""
    names = ("max_tokens", "temperature", "top_p", "seed")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    checked(SamplingParams, **given)
    return given
