"""The console of `callboard serve`: the user reads Callboard's sentences there, and nothing else."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_SILENT_S = 15.0  # time without a line, until one names the part of a start that takes long


class Console:
    """The original stdout and stderr. `divert` sends other output of this process to a log."""

    def __init__(self, on_phase: Callable[[str], None], silent_s: float = _SILENT_S) -> None:
        """`on_phase` is called at the end of each phase. `silent_s`: see `waiting_for`."""
        self._on_phase = on_phase
        self._start = self._last_line = time.monotonic()
        self._silent_s = silent_s
        self._out, self._err = (os.fdopen(os.dup(stream.fileno()), "w") for stream in (sys.stdout, sys.stderr))

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Print `what` after each `silent_s` seconds of the context without a line."""
        ended = threading.Event()
        reporter = threading.Thread(target=self._report_waiting, args=(what, ended), name="still-waiting", daemon=True)
        reporter.start()
        try:
            yield
        finally:
            ended.set()
            reporter.join()

    def _report_waiting(self, what: str, ended: threading.Event) -> None:
        load, cores = os.getloadavg, len(os.sched_getaffinity(0))
        while not ended.wait(max(0.0, self._last_line + self._silent_s - time.monotonic())):
            if time.monotonic() >= self._last_line + self._silent_s:
                self.report(
                    f"{self._seconds()}  still waiting for {what}; the load is {load()[0]:.0f} on {cores} cores"
                )

    def divert(self, log: Path) -> None:
        """Send the output of Ray and its libraries to `log`. They write to the file descriptors directly."""
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(descriptor, stream.fileno())
        os.close(descriptor)

    def phase(self, text: str) -> None:
        """Print a phase that has just ended, with the seconds since the command began."""
        self.report(f"{self._seconds()}  {text}")
        self._on_phase(text)

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._start:6.1f} s"

    def report(self, text: str) -> None:
        """Print a line on stderr."""
        self._write(self._err, text)

    def announce(self, text: str) -> None:
        """Print a line on stdout."""
        self._write(self._out, text)

    def _write(self, stream: IO[str], text: str) -> None:
        self._last_line = time.monotonic()
        with suppress(OSError):  # the reader has ended (`callboard serve | head -1`); the server goes on
            print(text, file=stream, flush=True)
