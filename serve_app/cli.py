"""The `callboard` command: serve a model, talk to one, complete a text, or tell what a model is.

Nothing heavy is imported before a command needs it, so that --help and usage errors are immediate. Exit codes: 0 done,
1 it failed, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from runtime.core.types import CallboardError
from serve_app.commands import bench, chaos, chat, doctor, generate, inspect, models, replay, serve
from serve_app.commands.flags import UsageError

_COMMANDS = (serve, chat, generate, models, inspect, doctor, replay, bench, chaos)  # in the order of --help


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except UsageError as e:
        print(f"callboard: {e}", file=sys.stderr)
        return 2
    except CallboardError as e:
        print(f"callboard: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("callboard: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `callboard generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:  # of a file or a connection that the user named
        where = "" if e.filename is None else f" ({e.filename})"
        print(f"callboard: {e.strerror or e}{where}; check the path, its permissions and its disk.", file=sys.stderr)
        return 1
    except UnicodeDecodeError as e:
        print(f"callboard: The input is not UTF-8 at byte {e.start}; convert it.", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="callboard", description="An LLM inference runtime made of Ray actors.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(commands)
    return parser


class _Version(argparse.Action):
    """Asks for the version only when it is wanted: that reads the metadata of installed packages."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        from importlib.metadata import version

        print(f"callboard {version('callboard')}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
