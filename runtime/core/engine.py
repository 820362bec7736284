"""EngineCore: the step loop's body, without threads, clocks or transports.

    plan k+1  ->  submit  ->  collect k  ->  commit k  ->  plan k+2  ->  submit  ->  outputs of k  ->  collect k+1 ...

The scheduler decides, the executor computes, and this class keeps `pipeline_depth` steps between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from runtime.base.model_info import ModelInfo
from runtime.base.types import Request, StepOutput
from runtime.core.executor import Executor
from runtime.core.extra import Culprit, Extra
from runtime.core.request_state import RequestState
from runtime.core.scheduler import Scheduler
from runtime.core.settings import Settings
from runtime.core.stats import EngineStats


class EngineCore:
    """One model replica's engine. Not thread-safe: one thread calls everything."""

    def __init__(self, config: Settings, info: ModelInfo, executor: Executor, extras: Sequence[Extra] = ()) -> None:
        self.depth = config.pipeline_depth
        self.scheduler = Scheduler(config, info, extras)
        self.extras = self.scheduler.extras
        self.executor = executor

    @property
    def has_work(self) -> bool:
        """True if a request is live, a step is in flight, or an extra needs a step."""
        return bool(self.scheduler.requests) or self.scheduler.num_in_flight > 0 or self.extras.needs_plan()

    def add(self, request: Request, owner: Any = None) -> RequestState:
        """Queue a request; `owner` is carried in its state. Raises CallboardError if it can never be served."""
        return self.scheduler.add(request, owner)

    def abort(self, request_id: str) -> None:
        """End a request; an unknown id is not an error."""
        self.scheduler.abort(request_id)

    def must_wait_to_plan(self) -> bool:
        """Return True if the pipeline has room for a step that need not be planned yet."""
        return self.scheduler.num_in_flight < self.depth and self.scheduler.planning_delay_s() > 0

    def submit(self, late: bool = False) -> list[RequestState]:
        """Fill the pipeline and return the requests that were admitted. With `late`, leave out what can wait.

        Call it right after `collect`, before reading its output: the runners compute meanwhile. Like `collect`, it
        raises the executor's errors when a runner is lost; `recover` then continues."""
        scheduler = self.scheduler
        admitted: list[RequestState] = []
        while scheduler.num_in_flight < self.depth and not (late and self.must_wait_to_plan()):
            if (step := scheduler.schedule()) is None:
                break
            admitted += step.admitted
            self.executor.submit(step.plan)
        return admitted

    def collect(self) -> StepOutput | None:
        """Wait for the oldest step in flight and commit it; None if there is none."""
        if not self.scheduler.num_in_flight:
            for on_idle in self.extras.on_idle:
                on_idle()
            return None
        return self.scheduler.commit(self.executor.collect())

    def step(self) -> StepOutput | None:
        """Fill the pipeline, then wait for its oldest step."""
        self.submit()
        return self.collect()

    def current_stats(self) -> EngineStats:
        """Return the counters and the gauges of this moment."""
        s = self.scheduler
        return replace(
            s.stats,
            running=len(s.running),
            waiting=len(s.waiting),
            waiting_tokens=s.waiting.num_tokens,
            blocks_total=s.pool.num_blocks - 1,
            blocks_available=s.pool.num_available,
            snapshots=s.kv_cache.num_snapshots,
            snapshots_evicted=s.kv_cache.num_evicted_snapshots,
        )

    def stats(self) -> dict[str, Any]:
        """Return all statistics by name, including the extras' own."""
        stats = self.current_stats()
        figures = asdict(stats) | {"accepted_draft_tokens": stats.accepted_draft_tokens}
        for extra_figures in self.extras.stats:
            figures |= extra_figures()
        return figures

    def lose(self) -> Culprit | None:
        """The runners are lost. Returns the request that is at fault, which has ended."""
        return self.scheduler.requeue_all()

    def recover(self, executor: Executor) -> None:
        """Continue with fresh runners behind `executor`, which compute every live request again (C8)."""
        self.executor = executor
        self.scheduler.requeue_all()
