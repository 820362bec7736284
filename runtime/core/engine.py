"""EngineCore: the step loop's body, without threads, clocks or transports.

    plan k+1  ->  submit  ->  collect k  ->  commit k  ->  outputs of k

The scheduler decides, the executor computes, this class keeps `pipeline_depth` steps between them.
"""

from __future__ import annotations

from typing import Any

from runtime.core.config import EngineConfig, ModelInfo
from runtime.core.executor import Executor
from runtime.core.scheduler import RequestState, Scheduler
from runtime.core.types import Request, StepOutput


class EngineCore:
    """One model replica's engine. Not thread-safe: one thread calls everything."""

    def __init__(self, config: EngineConfig, info: ModelInfo, executor: Executor) -> None:
        self.depth = config.pipeline_depth
        self.scheduler = Scheduler(config, info)
        self.executor = executor
        self.steps_done = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is live or any step in flight."""
        return bool(self.scheduler.requests) or self.scheduler.num_in_flight > 0

    def add(self, request: Request, owner: Any = None) -> RequestState:
        """Queue a request; `owner` comes back with its state. Raises CallboardError if it can never be served."""
        return self.scheduler.add(request, owner)

    def abort(self, request_id: str) -> None:
        """End a request; an unknown id is no error."""
        self.scheduler.abort(request_id)

    def step(self) -> StepOutput | None:
        """Fill the pipeline, then wait for its oldest step. None if nothing was in flight.

        Raises what the executor raises when a runner is lost; `recover` then continues."""
        scheduler = self.scheduler
        while scheduler.num_in_flight < self.depth and (plan := scheduler.schedule()) is not None:
            self.executor.submit(plan)
        if not scheduler.num_in_flight:
            return None
        output = scheduler.commit(self.executor.collect())
        self.steps_done += 1
        return output

    def recover(self, executor: Executor) -> None:
        """Go on with fresh runners behind `executor`: every live request is recomputed (C8)."""
        self.executor = executor
        self.scheduler.requeue_all()
