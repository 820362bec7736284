"""What the engine core needs of the runners, however they are reached."""

from __future__ import annotations

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
