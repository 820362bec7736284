"""`callboard doctor`: check this machine."""

from __future__ import annotations

import argparse
from typing import Any

from serve_app.commands.flags import Formatter


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="check this machine, and tell what to fix", formatter_class=Formatter)
    parser.add_argument("--address", metavar="HOST:PORT", help="a Ray cluster that must be reachable")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from serve_app.doctor import report

    return report(args.address)
