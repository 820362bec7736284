"""`callboard chaos`: kill processes of a running server and count what clients notice."""

from __future__ import annotations

import argparse
from typing import Any

from serve_app.command_line.flags import add_client_key, client_key, positive, seconds


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("chaos", help="kill processes of a running server while it streams, and count")
    parser.add_argument("url", help="of a server of yours on this machine, such as http://127.0.0.1:8000")
    what = "what to kill, one after another, with commas between: engine, runner, draft, supervisor, front"
    parser.add_argument("--kill", metavar="NAMES", type=_roles, default=(), help=f"{what}; default: by keys")
    parser.add_argument("--every", type=seconds, default=5.0, metavar="SECONDS", help="between two kills")
    parser.add_argument("--streams", type=positive, default=100, metavar="N", help="conversations at once")
    parser.add_argument("--max-tokens", type=positive, default=200, metavar="N", help="tokens of each answer")
    parser.add_argument("--application", metavar="NAME", help="which one, if several run on the same Ray")
    add_client_key(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from serve_app.tools.chaos import ChaosPlan, chaos

    plan = ChaosPlan(args.kill, args.every, args.streams, args.max_tokens, args.application, client_key(args))
    return chaos(args.url, plan)


def _roles(text: str) -> tuple[str, ...]:
    known, names = ("engine", "runner", "draft", "supervisor", "front"), tuple(text.split(","))
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return names
