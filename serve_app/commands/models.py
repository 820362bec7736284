"""`callboard models`: list the model families that run."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("models", help="list the models that run, and what of them is verified")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from runtime.inspection import families

    print(families())
    return 0
