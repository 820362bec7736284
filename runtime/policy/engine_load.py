"""EngineLoad: one engine's work and free memory, for routing and scaling."""

from __future__ import annotations

from typing import NamedTuple

from runtime.core.scheduler import Scheduler
from runtime.policy.queue_sizes import QueueSizes


class EngineLoad(NamedTuple):
    """One engine at one moment."""

    queued_tokens: int = 0  # known tokens that its requests have still to compute, without cached ones
    num_running: int = 0  # requests that hold a slot
    num_waiting: int = 0  # requests without a slot
    num_free_blocks: int = 0  # KV blocks that no request holds, cached or not
    num_blocks: int = 0  # KV blocks in all

    @classmethod
    def of(cls, scheduler: Scheduler) -> EngineLoad:
        """Return the load of the engine with this scheduler.

        Waiting requests' cached tokens are as of their arrival, and count only if a front follows the cache
        (`PrefixCache.pending_events`)."""
        waiting, pool = scheduler.waiting, scheduler.pool
        started = 0  # tokens in prompts that are computed in part
        for state in scheduler.running:
            missing = len(state.tokens) - state.num_computed
            if missing > 1:
                started += missing
        sizes = scheduler.extras.get(QueueSizes)
        queued = waiting.num_tokens + started - (sizes.num_hits if sizes is not None else 0)
        return cls(queued, len(scheduler.running), len(waiting), pool.num_available, pool.num_blocks - 1)
