"""`callboard chat`: talk to a model in the terminal."""

from __future__ import annotations

import argparse
from typing import Any

from serve_app.commands.flags import (
    Formatter,
    add_engine_flags,
    add_model,
    add_sampling_flags,
    engine_config,
    sampling_fields,
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("chat", help="talk to a model in the terminal", formatter_class=Formatter)
    add_model(parser)
    parser.add_argument("--url", help="talk to a server, such as http://127.0.0.1:8000, instead of loading the model")
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling_flags(parser, None)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    given = sampling_fields(args)
    config = engine_config(args)
    from serve_app.chat import LocalModel, RemoteModel, talk

    talk(RemoteModel(args.url, given) if args.url else LocalModel(config, given), args.system)
    return 0
