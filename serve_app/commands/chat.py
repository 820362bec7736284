"""`callboard chat`: talk to a model in the terminal."""

from __future__ import annotations

import argparse
from typing import Any

from runtime.base.config import EngineConfig
from serve_app.command_line.flags import (
    add_client_key,
    add_flags,
    add_model,
    add_sampling_flags,
    client_key,
    engine_config,
    sampling_fields,
)

_MOST_USED = {
    "url": "talk to this server instead of loading the model",
    "api-key KEY": "of the server; or $CALLBOARD_API_KEY",
    "system": "the system message",
    "max-tokens": "most tokens of an answer",
    "temperature": "0 is greedy",
    "seed": "same seed, same output",
    "quantization FORM": "weights in 8 or 4 bits: fp8, int8, int4 or nf4",
    "device": "where the model runs",
}
_EXAMPLES = ("callboard chat", "callboard chat Qwen/Qwen3-0.6B", "callboard chat --url http://127.0.0.1:8000")


def add_parser(commands: Any) -> None:
    what = "talk to a model in the terminal"
    parser = commands.add_parser("chat", help=what, most_used=_MOST_USED, examples=_EXAMPLES)
    add_model(parser)
    parser.add_argument("--url", help="talk to a server, such as http://127.0.0.1:8000, instead of loading the model")
    add_client_key(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling_flags(parser, None)
    add_flags(parser, EngineConfig)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    given = sampling_fields(args)
    config = engine_config(args)
    from serve_app.terminal.partners import LocalModel, RemoteModel
    from serve_app.terminal.talk import talk

    talk(RemoteModel(args.url, given, client_key(args)) if args.url else LocalModel(config, given), args.system)
    return 0
