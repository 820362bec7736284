"""The console of `callboard serve`: the user reads Callboard's sentences there, and nothing else."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO


class Console:
    """The original stdout and stderr. `divert` sends other output of this process to a log."""

    def __init__(self, on_phase: Callable[[str], None]) -> None:
        """`on_phase` is called at the end of each phase."""
        self._on_phase = on_phase
        self._start = time.monotonic()
        self._out, self._err = (os.fdopen(os.dup(stream.fileno()), "w") for stream in (sys.stdout, sys.stderr))

    def divert(self, log: Path) -> None:
        """Send the output of Ray and its libraries to `log`. They write to the file descriptors directly."""
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(descriptor, stream.fileno())
        os.close(descriptor)

    def phase(self, text: str) -> None:
        """Print a phase that has just ended, with the seconds since the command began."""
        self.report(f"{time.monotonic() - self._start:6.1f} s  {text}")
        self._on_phase(text)

    def report(self, text: str) -> None:
        """Print a line on stderr."""
        self._write(self._err, text)

    def announce(self, text: str) -> None:
        """Print a line on stdout."""
        self._write(self._out, text)

    def _write(self, stream: IO[str], text: str) -> None:
        with suppress(OSError):  # the reader has ended (`callboard serve | head -1`); the server goes on
            print(text, file=stream, flush=True)
