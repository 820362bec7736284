"""`callboard rm`: remove stored models."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from runtime.base.types import CallboardError


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("rm", help="remove stored models")
    what = "a model as `ls` lists it; a hub id without a quantization means all of its files"
    parser.add_argument("models", nargs="+", metavar="MODEL", help=what)
    parser.add_argument("--yes", action="store_true", help="remove without a question")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from runtime.loading.resolve import cache_folder
    from runtime.loading.sources.download import size_text
    from runtime.loading.sources.stored import stored_model

    for name in args.models:
        model = stored_model(name, cache_folder())
        size = size_text(model.num_bytes)
        if not args.yes:
            if not sys.stdin.isatty():
                raise CallboardError(f"{name} ({size}) is not removed without a question; pass --yes.")
            if input(f"Remove {name} ({size}) from {model.place}? [y/N] ").strip().lower() not in ("y", "yes"):
                continue
        model.remove()
        print(f"Removed {name}: {size} are free again.")
    return 0
