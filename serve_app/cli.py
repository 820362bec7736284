"""The `callboard` command: its commands, and the sentences of their errors.

Nothing heavy is imported before a command needs it, so that --help and usage errors are immediate, and nothing at all
before Ctrl-C is caught. Exit codes: 0 done, 1 it failed, 2 the command line is wrong."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing would be imported before Ctrl-C is caught
if TYPE_CHECKING:
    from serve_app.command_line.parser import CommandParser


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print("callboard: interrupted", file=sys.stderr)
        return 1


def _run(argv: list[str] | None) -> int:
    """Run a command and return its exit code; each error is one sentence on stderr."""
    from runtime.base.types import CallboardError
    from serve_app.command_line.parser import UsageError

    commands = parser()
    if not (sys.argv[1:] if argv is None else argv):
        commands.print_help()
        return 0
    args = commands.parse_args(argv)
    try:
        return int(args.run(args))
    except CallboardError as e:
        print(f"callboard: {args.parser.with_flags(str(e))}", file=sys.stderr)
        return 2 if isinstance(e, UsageError) else 1
    except BrokenPipeError:  # `callboard generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:  # from a file or a connection that the user named
        where = "" if e.filename is None else f" ({e.filename})"
        print(f"callboard: {e.strerror or e}{where}; check the path, its permissions and its disk.", file=sys.stderr)
        return 1
    except UnicodeDecodeError as e:
        print(f"callboard: The input is not UTF-8 at byte {e.start}; convert it.", file=sys.stderr)
        return 1


def parser() -> CommandParser:
    """Return the parser of all commands; --help lists them in this order."""
    from serve_app.command_line.parser import CommandParser, PrintVersion
    from serve_app.commands import (
        bench,
        chaos,
        chat,
        compile,
        doctor,
        generate,
        inspect,
        launch,
        ls,
        models,
        pull,
        replay,
        rm,
        serve,
        stop,
    )  # fmt: skip

    found = CommandParser(prog="callboard", description="An LLM inference runtime made of Ray actors.")
    found.add_argument("--version", action=PrintVersion, nargs=0, help="print the version and exit")
    commands = found.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=CommandParser)
    shown = serve, stop, chat, launch, generate, models, inspect, compile, pull, ls, rm, doctor, replay, bench, chaos
    for command in shown:
        command.add_parser(commands)
    return found


if __name__ == "__main__":
    sys.exit(main())
