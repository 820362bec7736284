"""`callboard serve`: serve a model over HTTP."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields, replace
from typing import Any

from serve_app.commands.flags import (
    Formatter,
    UsageError,
    add_engine_flags,
    add_flags,
    add_model,
    checked,
    engine_config,
    http_settings,
    port,
    positive,
)
from serve_app.settings import HttpSettings, ScalingSettings


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve a model over OpenAI-compatible HTTP", formatter_class=Formatter)
    add_model(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is every interface")
    parser.add_argument("--port", type=port, default=8000, help="port to listen on")
    parser.add_argument("--served-model-name", metavar="NAME", help="the name that clients use; default: MODEL")
    fronts = "front replicas that share the engines; default: one per 4 CPUs, at most 4"
    parser.add_argument("--num-fronts", type=positive, metavar="N", help=fronts)
    add_flags(parser.add_argument_group("scaling", "how many model replicas there are"), ScalingSettings)
    add_flags(parser.add_argument_group("http", "what the front door allows"), HttpSettings)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    from serve_app.server import ServerSettings, serve

    if config.chat_template is not None:  # the fronts have another working directory
        config = replace(config, chat_template=os.path.abspath(config.chat_template))
    config = replace(config, lora=tuple(f"{name}={os.path.abspath(path)}" for name, path in config.adapters.items()))
    http = http_settings(args).listening_on(args.host)
    if http.lora_folder is not None and not config.max_loras:
        raise UsageError("--lora-folder is given, but there is no room for adapters; give --max-loras, too.")
    serve(
        ServerSettings(
            config,
            http,
            host=args.host,
            port=args.port,
            served_model_name=args.served_model_name,
            scaling=checked(ScalingSettings, **{f.name: getattr(args, f.name) for f in fields(ScalingSettings)}),
            num_fronts=args.num_fronts,
        )
    )
    return 0
