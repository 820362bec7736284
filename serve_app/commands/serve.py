"""`callboard serve`: serve models over HTTP."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields, replace
from typing import Any

from runtime.base.config import DEFAULT_MODEL, EngineConfig
from runtime.loading.sources.names import absolute
from serve_app.command_line.flags import (
    add_flags,
    add_model,
    checked,
    engine_config,
    group_of,
    http_settings,
    port,
    positive,
)
from serve_app.command_line.parser import UsageError
from serve_app.settings import HttpSettings, ModelSettings, ScalingSettings

_MOST_USED = {
    "host": "address to listen on; 0.0.0.0 is every interface",
    "port": "port to listen on",
    "served-model-name": "names that clients use; default: MODEL",
    "api-key KEY": "a key for clients; or $CALLBOARD_API_KEY",
    "max-model-len N": "longest prompt + output in tokens",
    "quantization FORM": "weights in 8 or 4 bits: fp8, int8, int4 or nf4",
    "lora NAME=FOLDER": "an adapter, which clients use as the model NAME",
    "draft MODEL": "a small model, or ngram, for draft tokens",
    "idle-sleep TIME": "idle time, such as 10m, until a model leaves the memory",
    "tensor-parallel-size": "GPUs that share the model",
    "device": "where the model runs",
    "config": "a YAML or TOML file of flags",
}
_EXAMPLES = (
    "callboard serve Qwen/Qwen3-0.6B --port 8080",
    "callboard serve model.gguf --served-model-name small gpt-4o",
    "callboard serve Qwen/Qwen3-0.6B model.gguf --idle-sleep 10m",
    "callboard serve meta-llama/Llama-3.1-8B-Instruct --quantization fp8",
)


def add_parser(commands: Any) -> None:
    what = "serve models over HTTP, with OpenAI's and Anthropic's APIs"
    parser = commands.add_parser("serve", help=what, most_used=_MOST_USED, examples=_EXAMPLES)
    model = add_model(parser)
    model.default = None  # if it is not given
    parser.add_argument("more_models", nargs="*", metavar="MODEL", help="more models, which share the machine")
    group_of(parser, "model").add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="the names that clients use; answers have the first one; default: MODEL",
    )
    http = group_of(parser, "http")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every interface")
    http.add_argument("-p", "--port", type=port, default=8000, metavar="N", help="port to listen on")
    model_fields = [f.name for each in (EngineConfig, ScalingSettings) for f in fields(each)]
    parser.add_config_file(["served_model_name", *model_fields])
    fronts = "front replicas that share the engines; default: one per 4 CPUs, at most 4"
    group_of(parser, "scaling").add_argument("--num-fronts", type=positive, metavar="N", help=fronts)
    add_flags(parser, EngineConfig, ScalingSettings, HttpSettings)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _check_names(args)
    models = [_model(each) for each in _each_model(args)]
    from serve_app.server.serve import serve
    from serve_app.server.server_settings import ServerSettings

    http = http_settings(args).listening_on(args.host)
    http.check_extras()
    for config, *_ in models:
        _check_together(config, http, args.host)
    settings = checked(ModelSettings.of_all, models=models)
    serve(ServerSettings(settings, http, host=args.host, port=args.port, num_fronts=args.num_fronts))
    return 0


def _each_model(args: argparse.Namespace) -> list[argparse.Namespace]:
    """Return the flags of each model, from a config file's `models`, or the same for each MODEL."""
    entries: list[argparse.Namespace] = getattr(args, "models", [])
    if entries and args.more_models:
        raise UsageError(f"{args.config} has models, and MODEL is {args.more_models[0]!r}; give one of both.")
    given = [args.model or DEFAULT_MODEL, *args.more_models]
    return entries or [argparse.Namespace(**{**vars(args), "model": model}) for model in given]


def _model(args: argparse.Namespace) -> tuple[EngineConfig, tuple[str, ...], ScalingSettings]:
    """Return the settings of one model, with absolute paths: actors have another working directory."""
    config = engine_config(args)
    if config.chat_template is not None:
        config = replace(config, chat_template=os.path.abspath(config.chat_template))
    config = replace(config, lora=tuple(f"{name}={absolute(path)}" for name, path in config.adapters.items()))
    for name in ("weight_store", "kv_tier_folder"):
        if (folder := getattr(config, name)) is not None:
            config = replace(config, **{name: os.path.abspath(folder)})
    scaling = {f.name: getattr(args, f.name) for f in fields(ScalingSettings)}
    return config, tuple(args.served_model_name or ()), checked(ScalingSettings, **scaling)


def _check_together(config: EngineConfig, http: HttpSettings, host: str) -> None:
    """Raise CallboardError for model and server settings that do not fit together."""
    if config.weight_updates:
        http.check_weight_updates(host)
    if http.lora_folder is not None and not config.max_loras:
        raise UsageError("--lora-folder is given, but there is no room for adapters; give --max-loras, too.")
    if (http.weight_folder or config.weight_store) is not None and not config.weight_updates:
        name = "--weight-store" if http.weight_folder is None else "--weight-folder"
        raise UsageError(f"{name} is given, but the weights may not change; give --weight-updates, too.")


def _check_names(args: argparse.Namespace) -> None:
    """Refuse a MODEL among the names: `--served-model-name a MODEL` reads it as a name."""
    names: list[str] = args.served_model_name or []
    if args.model is None and len(names) > 1 and _looks_like_model(names[-1]):
        text = f"--served-model-name has {names[-1]!r} as a name, and no MODEL is given"
        raise UsageError(f"{text}; write MODEL first, or `-- MODEL` after the names ({DEFAULT_MODEL} is the default).")


def _looks_like_model(name: str) -> bool:
    return "/" in name or name.startswith("pypi:") or name.endswith(".gguf") or os.path.exists(name)
