"""`python -m callboard` is the `callboard` command."""

import sys


def main() -> int:
    """Runs one command and returns its exit code."""
    from serve_app.cli import main as run  # here, so that the command itself reports Ctrl-C

    return run()


if __name__ == "__main__":
    sys.exit(main())
