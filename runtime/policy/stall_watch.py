"""StallWatch: notices requests that are live while no step computes them."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable

STALL_S = 5.0


class StallWatch:
    """Compares a mark that changes with each step. One thread calls `look`, about once a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mark: object = None
        self._since = 0.0
        self._is_reported = False

    def look(self, mark: object) -> bool:
        """Return True once in each stall: the mark has not changed for STALL_S. None if no step is due."""
        if mark is None or mark != self._mark:
            self._mark, self._since, self._is_reported = mark, self._clock(), False
            return False
        if self._is_reported or self._clock() - self._since < STALL_S:
            return False
        self._is_reported = True
        return True


def stacks() -> str:
    """Return the stacks of this process's threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames().items()
    return "\n".join(f"{names.get(i, i)}:\n{''.join(traceback.format_stack(frame))}" for i, frame in frames)
