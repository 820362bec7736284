"""`callboard models`: the model families that run, and details of some."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "models",
        help="list the models that run, and what of them is verified",
        examples=("callboard models", "callboard models qwen3"),
    )
    what = "the name of a family or of a part of it: its details, with the GPU memory for a context of 8192 tokens"
    parser.add_argument("name", nargs="?", metavar="NAME", help=what)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from runtime.family_report import family_details, family_table

    print(family_table() if args.name is None else family_details(args.name))
    return 0
