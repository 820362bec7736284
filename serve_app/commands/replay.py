"""`callboard replay`: send a request again and compare the answers."""

from __future__ import annotations

import argparse
from typing import Any

from serve_app.command_line.flags import add_client_key, client_key


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("replay", help="send a request again and compare the answers, to the bit")
    what = "the id of an answer of this server, or a JSON file that has a `request` and its `answer`"
    parser.add_argument("source", metavar="REQUEST_ID_OR_FILE", help=what)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    add_client_key(parser)
    parser.add_argument("--save", metavar="FILE", help="write the request and its new answer to a file to replay")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from serve_app.tools.replay import replay

    return replay(args.source, args.url, client_key(args), args.save)
