"""The line on stderr that shows how far the load of a model is."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from runtime.base.config import EngineConfig, names_of

if TYPE_CHECKING:
    from runtime.llm import LLM

_ERASE = "\r\x1b[K"


class Progress:
    """A line of a terminal that each phase replaces; nothing where stderr is not a terminal."""

    def __init__(self, subject: str) -> None:
        self._subject, self._start, self._shows = subject, time.monotonic(), sys.stderr.isatty()

    def show(self, phase: str) -> None:
        """The phase that begins now. The cursor stays at the left, so that other output replaces the line."""
        seconds = time.monotonic() - self._start
        self._write(f"{_ERASE}{self._subject}: {phase} ({seconds:.1f} s)\r")

    def end(self) -> None:
        """Erase the line."""
        self._write(_ERASE)

    def _write(self, text: str) -> None:
        if self._shows:
            sys.stderr.write(text)
            sys.stderr.flush()


@contextmanager
def without_echo() -> Iterator[None]:
    """Hide what a user types within the block. The next prompt shows it."""
    try:
        import termios

        shown = termios.tcgetattr(sys.stdin)
    except (ImportError, OSError, ValueError, termios.error):  # not a terminal
        yield
        return
    hidden = [*shown]
    hidden[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, shown)


def load(config: EngineConfig) -> LLM:
    """Load a model into this process, and show the phases on a terminal."""
    progress = Progress(f"Loading {names_of(config.model)[0]}")
    progress.show("importing PyTorch")
    try:
        with without_echo():
            from runtime.llm import LLM

            return LLM(on_phase=progress.show, **asdict(config))
    finally:
        progress.end()
