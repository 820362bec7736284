"""An answer's sum with its prompt's and output's times, which Ollama and llama.cpp report."""

from __future__ import annotations

import time

from runtime.output.processor import Delta
from serve_app.protocol.answers import ChoiceUsage


class Times:
    """The times of a request's start and first token, in nanoseconds."""

    def __init__(self) -> None:
        self._start, self._first = time.monotonic_ns(), 0

    def note(self) -> None:
        """Record the arrival of tokens."""
        self._first = self._first or time.monotonic_ns()

    def spans(self) -> tuple[int, int]:
        """Return the durations of prompt and output so far."""
        now = time.monotonic_ns()
        first = self._first or now
        return first - self._start, now - first


class TimedChoice(Delta):
    """The sum of a choice's deltas, with its times."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.times, self.usage = Times(), ChoiceUsage()

    def add(self, new: Delta) -> None:
        self.times.note()
        self.usage.add(new)
        super().add(new)
