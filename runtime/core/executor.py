"""What the engine core needs of the runners, however they are reached; and the nearest one, in the same process."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from runtime.core.plan import StepPlan, StepResult


class Executor(Protocol):
    """Carries plans to every rank and brings rank 0's results back, both in order."""

    def submit(self, plan: StepPlan) -> None:
        """Queue a step on all ranks; returns at once."""
        ...

    def collect(self) -> StepResult:
        """Block for the oldest outstanding step."""
        ...

    def close(self) -> None:
        """Let go of the ranks; a blocked `collect` in another thread returns with an error."""
        ...


class Runner(Protocol):
    """What computes steps (runtime.worker.runner.ModelRunner)."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply `plan` and compute its rows."""
        ...


class InProcess:
    """An Executor around one runner of this process; a step runs when it is collected."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._queue: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._queue.append(plan)

    def collect(self) -> StepResult:
        return self._runner.execute(self._queue.popleft())

    def close(self) -> None:
        self._queue.clear()
