"""`callboard serve`: serve a model over HTTP."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields, replace
from typing import Any

from runtime.spec.config import DEFAULT_MODEL, EngineConfig
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
from serve_app.settings import HttpSettings, ScalingSettings

_MOST_USED = {
    "host": "address to listen on; 0.0.0.0 is every interface",
    "port": "port to listen on",
    "served-model-name": "names that clients use; default: MODEL",
    "api-key KEY": "a key for clients; or $CALLBOARD_API_KEY",
    "max-model-len N": "longest prompt + output in tokens",
    "quantization FORM": "weights in 8 or 4 bits: fp8, int8, int4 or nf4",
    "lora NAME=FOLDER": "an adapter, which clients use as the model NAME",
    "draft MODEL": "a small model, or ngram, for draft tokens",
    "tensor-parallel-size": "GPUs that share the model",
    "device": "where the model runs",
    "config": "a YAML or TOML file of flags",
}
_EXAMPLES = (
    "callboard serve Qwen/Qwen3-0.6B --port 8080",
    "callboard serve model.gguf --served-model-name small gpt-4o",
    "callboard serve meta-llama/Llama-3.1-8B-Instruct --quantization fp8",
)


def add_parser(commands: Any) -> None:
    what = "serve a model over HTTP, with OpenAI's and Anthropic's APIs"
    parser = commands.add_parser("serve", help=what, most_used=_MOST_USED, examples=_EXAMPLES)
    model = add_model(parser)
    model.default = None  # if it is not given
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
    parser.add_config_file()
    fronts = "front replicas that share the engines; default: one per 4 CPUs, at most 4"
    group_of(parser, "scaling").add_argument("--num-fronts", type=positive, metavar="N", help=fronts)
    add_flags(parser, EngineConfig, ScalingSettings, HttpSettings)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    _check_names(args)
    config = engine_config(args)
    from serve_app.server.serve import serve
    from serve_app.server.server_settings import ServerSettings

    if config.chat_template is not None:  # the fronts have another working directory
        config = replace(config, chat_template=os.path.abspath(config.chat_template))
    config = replace(config, lora=tuple(f"{name}={os.path.abspath(path)}" for name, path in config.adapters.items()))
    if config.weight_store is not None:  # as engines and runners do
        config = replace(config, weight_store=os.path.abspath(config.weight_store))
    http = http_settings(args).listening_on(args.host)
    http.check_extras()
    if config.weight_updates:
        http.check_weight_updates(args.host)
    if http.lora_folder is not None and not config.max_loras:
        raise UsageError("--lora-folder is given, but there is no room for adapters; give --max-loras, too.")
    if (http.weight_folder or config.weight_store) is not None and not config.weight_updates:
        name = "--weight-store" if http.weight_folder is None else "--weight-folder"
        raise UsageError(f"{name} is given, but the weights may not change; give --weight-updates, too.")
    serve(
        ServerSettings(
            config,
            http,
            host=args.host,
            port=args.port,
            served_model_names=tuple(args.served_model_name or ()),
            scaling=checked(ScalingSettings, **{f.name: getattr(args, f.name) for f in fields(ScalingSettings)}),
            num_fronts=args.num_fronts,
        )
    )
    return 0


def _check_names(args: argparse.Namespace) -> None:
    """Refuse a MODEL among the names: `--served-model-name a MODEL` reads it as a name."""
    names: list[str] = args.served_model_name or []
    if args.model is None and len(names) > 1 and _looks_like_model(names[-1]):
        text = f"--served-model-name has {names[-1]!r} as a name, and no MODEL is given"
        raise UsageError(f"{text}; write MODEL first, or `-- MODEL` after the names ({DEFAULT_MODEL} is the default).")


def _looks_like_model(name: str) -> bool:
    return "/" in name or name.startswith("pypi:") or name.endswith(".gguf") or os.path.exists(name)
