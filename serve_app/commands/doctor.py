"""`callboard doctor`: check this machine."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="check this machine, and list what to fix")
    parser.add_argument("--address", metavar="HOST:PORT", help="a Ray cluster that must be reachable")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from serve_app.tools.doctor import report

    return report(args.address)
