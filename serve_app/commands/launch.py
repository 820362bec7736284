"""`callboard launch`: start an agent program with a server's model, without a change to the user's configuration."""

from __future__ import annotations

import argparse
from typing import Any

from serve_app.command_line.flags import add_client_key, client_key


def add_parser(commands: Any) -> None:
    from serve_app.tools.launch import AGENTS

    what = "start an agent program with a served model"
    parser = commands.add_parser("launch", help=what)
    parser.add_argument(
        "agent", choices=tuple(AGENTS), metavar="AGENT", help=f"{', '.join(AGENTS)}; words after -- are its own"
    )
    parser.pass_on("arguments")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--model", metavar="NAME", help="one of the server's models; default: its first")
    parser.add_argument("--dry-run", action="store_true", help="print the command and its variables only")
    add_client_key(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from serve_app.tools.launch import launch

    return launch(args.agent, args.arguments, args.url, args.model, client_key(args), args.dry_run)
