"""`callboard stop`: end a server of this machine, and forget what its requests have left in memory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from serve_app.command_line.flags import port


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("stop", help="end a server of this machine; --forget also deletes its KV tier")
    parser.add_argument("-p", "--port", type=port, default=8000, metavar="N", help="the server's port")
    what = "delete the KV tier, which outlives servers; no server needs to run for it"
    parser.add_argument("--forget", action="store_true", help=what)
    parser.add_argument("--kv-tier-name", metavar="NAME", help="as the server has it; default: callboard")
    parser.add_argument("--kv-tier-folder", metavar="FOLDER", help="as the server has it; default: none")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from runtime.base.types import CallboardError
    from runtime.loading.sources.download import size_text
    from runtime.tier.place import base_folder, forget
    from serve_app.processes.application_processes import server_at
    from serve_app.server.server_settings import APP_NAME

    server = server_at(args.port)
    if server is not None:
        server.stop()
        print(f"The server on port {args.port} has ended.")
    elif not args.forget:
        raise CallboardError(f"No `callboard serve` of yours has port {args.port} of this machine; name another port.")
    if args.forget:
        name, disk = args.kv_tier_name or APP_NAME, args.kv_tier_folder
        for base in [base_folder(), *([Path(disk)] if disk else [])]:
            print(f"The KV tier {name!r} of {base} is deleted: {size_text(forget(base, name))} are free again.")
    return 0
