"""Resident memory and CPU time of this machine's processes, by their role in the application."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MEMORY, CPU = "process_resident_memory_bytes", "process_cpu_seconds"  # Prometheus' names of both metrics
ROLES = ("front", "engine", "runner", "draft", "supervisor")
_TICKS_A_SECOND, _PAGE_BYTES = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class ProcessFigures(NamedTuple):
    """The use of processes, by role."""

    memory: dict[str, float]  # resident bytes now
    cpu: dict[str, float]  # seconds of all processes with the role, ended ones included


class ProcessMeter:
    """Reads process figures. A process's CPU time remains counted after its end."""

    def __init__(self, processes: Callable[[], Iterable[tuple[str, int]]]) -> None:
        """`processes` returns the role and the process id of each living process."""
        self._processes = processes
        self._cpu: defaultdict[str, float] = defaultdict(float)
        self._last: dict[tuple[int, int], float] = {}  # CPU seconds, by process id and start time
        self._reading = threading.Lock()

    def read(self) -> ProcessFigures:
        """Read the figures now, from any thread."""
        with self._reading:
            memory: defaultdict[str, float] = defaultdict(float)
            last, self._last = self._last, {}
            for role, pid in self._processes():
                with suppress(OSError):  # it has ended
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    key, seconds = (pid, int(fields[19])), (int(fields[11]) + int(fields[12])) / _TICKS_A_SECOND
                    memory[role] += int(fields[21]) * _PAGE_BYTES
                    self._cpu[role] += seconds - last.get(key, 0.0)
                    self._last[key] = seconds
            return ProcessFigures(dict(memory), dict(self._cpu))


def of_this_process(role: str) -> ProcessMeter:
    """Return a meter of the calling process."""
    return ProcessMeter(lambda: [(role, os.getpid())])
