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
    """Stdout and stderr as they were at first; `divert` sends whatever else this process writes there to a log."""

    def __init__(self, on_phase: Callable[[str], None]) -> None:
        """`on_phase` hears of each phase that has ended."""
        self._on_phase = on_phase
        self._start = time.monotonic()
        self._out, self._err = (os.fdopen(os.dup(stream.fileno()), "w") for stream in (sys.stdout, sys.stderr))

    def divert(self, log: Path) -> None:
        """From now on, what Ray and its libraries print goes there: they write to the file descriptors themselves."""
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(descriptor, stream.fileno())
        os.close(descriptor)

    def phase(self, text: str) -> None:
        """A phase of the start that has ended just now, with the seconds since the command began."""
        self.say(f"{time.monotonic() - self._start:6.1f} s  {text}")
        self._on_phase(text)

    def say(self, text: str) -> None:
        """A line on stderr."""
        self._write(self._err, text)

    def announce(self, text: str) -> None:
        """A line on stdout."""
        self._write(self._out, text)

    def _write(self, stream: IO[str], text: str) -> None:
        with suppress(OSError):  # nobody reads any more (`callboard serve | head -1`): the server goes on
            print(text, file=stream, flush=True)
