"""Executor: the engine core's view of the runners, however they are reached; and the one in the same process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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

    def has_result(self) -> bool:
        """True if `collect` would return, or raise, at once; False if it may block."""
        ...

    def close(self) -> None:
        """Release the ranks. A blocked `collect` in another thread then raises an error."""
        ...


class Runner(Protocol):
    """Computes steps (runtime.worker.runner.ModelRunner)."""

    asynchronous: bool  # True if a launched step runs by itself; False if the wait does the work, as on a CPU

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start applying `plan` and computing its rows; the returned call waits for the result.

        Plans are launched by one thread and waited for, in the same order, by one thread, perhaps another."""
        ...

    def reset(self) -> None:
        """Drop all requests."""
        ...


class InProcess:
    """An Executor around one runner of this process."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._steps: deque[Callable[[], StepResult]] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._steps.append(self._runner.launch(plan))

    def collect(self) -> StepResult:
        return self._steps.popleft()()

    def has_result(self) -> bool:
        return False  # the wait may do the rest of the work

    def close(self) -> None:
        self._steps.clear()

    def reset(self) -> None:
        """Drop the steps in flight and the runner's requests: a step that raised may be half done."""
        self._steps.clear()
        self._runner.reset()
