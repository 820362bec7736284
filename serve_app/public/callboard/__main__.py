"""`python -m callboard` is the `callboard` command."""

import sys

from serve_app.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
