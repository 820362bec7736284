"""Two limits that editors set: the end of a text after some time, and at a line with less indentation."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

from runtime.output.processor import Delta


@dataclass(slots=True)
class _Progress:
    started: float | None = None  # time of the first token
    has_new_line: bool = False
    indentation: int | None = None  # the last line's so far; None within its text


class LineLimits:
    """Ends choices at either limit; both hold after the first line only."""

    def __init__(self, max_ms: int = 0, indentation: int = 0) -> None:
        """End a text `max_ms` after its first token if that is above 0, or before a line with less `indentation`.

        Indentation counts spaces and tabs. An empty line may have less."""
        self._max_s, self._least = max_ms / 1000, indentation
        self._choices: dict[int, _Progress] = defaultdict(_Progress)

    def __call__(self, delta: Delta) -> None:
        """Shorten a delta and end its choice if a limit is reached."""
        progress = self._choices[delta.index]
        now = time.monotonic()
        progress.started = now if progress.started is None else progress.started
        if self._least and (at := self._first_shallow(delta.text, progress)) is not None:
            delta.text, delta.finish_reason = delta.text[:at], "stop"
        progress.has_new_line |= "\n" in delta.text
        is_late = 0 < self._max_s <= now - progress.started
        if delta.finish_reason is None and is_late and progress.has_new_line:
            delta.finish_reason = "length"

    def _first_shallow(self, text: str, progress: _Progress) -> int | None:
        """Return where a text must end, before the line break ahead of a line with less indentation."""
        end = 0
        for at, char in enumerate(text):
            if char == "\n":
                end = at if progress.indentation is None else end
                progress.indentation = 0
            elif char in " \t":
                progress.indentation = None if progress.indentation is None else progress.indentation + 1
            elif progress.indentation is not None:
                if progress.indentation < self._least:
                    return end
                progress.indentation = None
        return None
