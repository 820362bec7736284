"""EngineCore: the step loop's body, without threads, clocks or transports.

    plan k+1  ->  submit  ->  collect k  ->  commit k  ->  plan k+2  ->  submit  ->  outputs of k  ->  collect k+1 ...

The scheduler decides, the executor computes, this class keeps `pipeline_depth` steps between them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from runtime.core.executor import Executor
from runtime.core.request_state import RequestState
from runtime.core.scheduler import Scheduler
from runtime.policy.step_pacing import StepPacing
from runtime.spec.config import EngineConfig, ModelInfo
from runtime.spec.types import Request, StepOutput
from runtime.speculation.choose_k import Speculation


class EngineCore:
    """One model replica's engine. Not thread-safe: one thread calls everything."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        executor: Executor,
        speculation: Speculation | None = None,
        pacing: StepPacing | None = None,
    ) -> None:
        self.depth = config.pipeline_depth
        self.scheduler = Scheduler(config, info, speculation, pacing)
        self.executor = executor
        self.steps_done = 0

    @property
    def has_work(self) -> bool:
        """True if any request is live or any step in flight."""
        return bool(self.scheduler.requests) or self.scheduler.num_in_flight > 0

    def add(self, request: Request, owner: Any = None) -> RequestState:
        """Queue a request; `owner` comes back with its state. Raises CallboardError if it can never be served."""
        return self.scheduler.add(request, owner)

    def abort(self, request_id: str) -> None:
        """End a request; an unknown id is no error."""
        self.scheduler.abort(request_id)

    def must_wait_to_plan(self) -> bool:
        """True if there is room for a step in the pipeline that need not be planned yet."""
        return self.scheduler.num_in_flight < self.depth and self.scheduler.planning_delay_s() > 0

    def submit(self, late: bool = False) -> list[RequestState]:
        """Fill the pipeline, with `late` by no step that need not be planned yet; returns the requests that were
        admitted. Called right after `collect`, and before its output is looked at, the runners compute meanwhile.

        Raises, as `collect` does, what the executor raises when a runner is lost; `recover` then continues."""
        scheduler = self.scheduler
        admitted: list[RequestState] = []
        while scheduler.num_in_flight < self.depth and not (late and self.must_wait_to_plan()):
            if (step := scheduler.schedule()) is None:
                break
            admitted += step.admitted
            self.executor.submit(step.plan)
        return admitted

    def collect(self) -> StepOutput | None:
        """Wait for the oldest step in flight; None if there is none, after waiting for guesses that are due."""
        if not self.scheduler.num_in_flight:
            if self.scheduler.speculation is not None:
                self.scheduler.speculation.drafter.wait()
            return None
        output = self.scheduler.commit(self.executor.collect())
        self.steps_done += 1
        return output

    def step(self) -> StepOutput | None:
        """Fill the pipeline, then wait for its oldest step."""
        self.submit()
        return self.collect()

    def stats(self) -> dict[str, Any]:
        """Counters and gauges."""
        s = self.scheduler
        return {
            "running": len(s.running),
            "waiting": s.num_waiting,
            "waiting_tokens": s.waiting.num_tokens,
            "steps": self.steps_done,
            "blocks_total": s.pool.num_blocks - 1,
            "blocks_available": s.pool.num_available,
            **asdict(s.stats),
            "accepted_draft_tokens": s.stats.accepted_draft_tokens,
            **({} if s.speculation is None else s.speculation.stats()),
        }

    def lose(self) -> RequestState | None:
        """The runners are gone; returns the request that is found to be at fault, which has ended."""
        return self.scheduler.requeue_all()

    def recover(self, executor: Executor) -> None:
        """Go on with fresh runners behind `executor`: every live request is recomputed (C8)."""
        self.executor = executor
        self.scheduler.requeue_all()
