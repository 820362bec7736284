"""`callboard inspect`: describe a model without loading its weights."""

from __future__ import annotations

import argparse
from typing import Any

from serve_app.commands.flags import Formatter, add_engine_flags, add_model, engine_config


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect", help="tell what a model is, without loading its weights", formatter_class=Formatter
    )
    add_model(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    from runtime.inspection import model_report

    print(model_report(config))
    return 0
