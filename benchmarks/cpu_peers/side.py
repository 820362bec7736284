"""The asking side: processes that measure, one at a time, while the others are stopped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.cpu_peers.jobs import Job

ROOT = Path(__file__).parents[2]
_STOP_S = 60
_LOG_LINES = 12  # of a failed process that the error shows


class SideError(Exception):
    """A side ended, or did not start; the message has its last lines."""


class Log:
    """The standard error of a process, in a temporary file."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - it stays open beside the process

    def last_lines(self) -> str:
        self.file.seek(0)
        return "\n".join(self.file.read().decode(errors="replace").splitlines()[-_LOG_LINES:])


class Side:
    """One process of `jobs.do_jobs`, which is stopped between its jobs so that its threads disturb no other side."""

    def __init__(self, module: str, settings: Mapping[str, Any], env: Mapping[str, str]) -> None:
        self.name, self._log = module, Log()
        command = [sys.executable, "-m", f"benchmarks.cpu_peers.{module}", json.dumps(dict(settings))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._log.file}
        self._process = subprocess.Popen(command, cwd=ROOT, env=os.environ | dict(env), text=True, **pipes)
        try:
            self.facts: dict[str, str] = self._reply()
        except BaseException:
            self.close()
            raise
        self._process.send_signal(signal.SIGSTOP)

    def measure(self, job: Job) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        figures = self._reply()
        self._process.send_signal(signal.SIGSTOP)
        return figures

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> SideError:
        return SideError(f"{self.name} ended with exit code {self._process.wait()}:\n{self._log.last_lines()}")


@contextlib.contextmanager
def closing_all(sides: Mapping[str, Side]) -> Iterator[None]:
    """Close all sides at the end. `sides` may grow meanwhile."""
    try:
        yield
    finally:
        for side in sides.values():
            side.close()


Rounds = dict[str, list[dict[str, float]]]  # side -> its figures of each round


def in_turns(sides: Mapping[str, Side], cell: str, rounds: int, new_tokens: int) -> Rounds:
    """Measure a cell with each side in each round, after a round that warms up."""
    found: Rounds = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            figures = side.measure(Job(cell, number, new_tokens))
            if number:
                found[name].append(figures)
    return found
