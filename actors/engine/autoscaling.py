"""How many engines an application needs: a policy of what they have to do, and the shell that lets Serve ask it.

The policy is pure: figures of the engines and a time in, a number of engines out. Serve pickles this module by value
into its controller, where none of our packages need be: it imports nothing but the standard library.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from runtime.core.scheduler import Scheduler
    from runtime.policy.engine_load import EngineLoad

DRAIN_S = 2.0  # the prompts that wait should be computed within this
ROWS = 0.8  # the share of its rows that an engine should use at most, and of its KV blocks
BLOCKS = 0.9
SPARE = 0.75  # engines go when those that stay would be at this share of these limits at most: 60 % of their rows


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The load of one engine, and its limits."""

    queued_tokens: float  # of prompts, still to be computed
    prefill_rate: float  # prompt tokens a second; 0: not known yet
    num_live: float  # requests that run or wait
    max_rows: float  # requests that can run at a time
    num_used_blocks: float
    num_blocks: float
    idle_s: float  # since it last had a request

    @classmethod
    def of(cls, scheduler: Scheduler, load: EngineLoad, prefill_rate: float, idle_s: float) -> EngineFigures:
        """Those of the engine with this scheduler."""
        return cls(
            queued_tokens=load.queued_tokens,
            prefill_rate=prefill_rate,
            num_live=len(scheduler.requests),
            max_rows=scheduler.max_num_seqs,
            num_used_blocks=load.num_blocks - load.num_free_blocks,
            num_blocks=load.num_blocks,
            idle_s=idle_s,
        )


def engines_needed(engines: Sequence[EngineFigures]) -> float:
    """So many engines like these would be just within the limits; a fraction, so that it can be compared."""
    if not engines:
        return 0.0
    num_engines, num_live = len(engines), sum(e.num_live for e in engines)
    rates = [e.prefill_rate for e in engines if e.prefill_rate > 0]
    backlog = sum(e.queued_tokens for e in engines) * len(rates) / (DRAIN_S * sum(rates)) if rates else 0.0
    return max(
        min(backlog, num_live),  # one prompt is computed by one engine, however long it is
        num_engines * num_live / (ROWS * sum(e.max_rows for e in engines)),
        num_engines * sum(e.num_used_blocks for e in engines) / (BLOCKS * sum(e.num_blocks for e in engines)),
    )


class ScalingPolicy:
    """Decides again and again; it remembers since when there were too few or too many."""

    def __init__(
        self,
        min_engines: int,
        max_engines: int,
        upscale_delay_s: float = 2.0,
        downscale_delay_s: float = 120.0,
        idle_s: float = 300.0,
    ) -> None:
        """Engines come after `upscale_delay_s` of too much load, and go after `downscale_delay_s` of little; the last
        one, if `min_engines` is 0, when nothing was asked of it for `idle_s`."""
        self._min, self._max = min_engines, max_engines
        self._upscale_delay_s, self._downscale_delay_s, self._idle_s = upscale_delay_s, downscale_delay_s, idle_s
        self._busy_since: float | None = None
        self._spare_since: float | None = None
        self._most_needed = 0  # since then

    def decide(self, engines: Sequence[EngineFigures], num_engines: int, now: float, num_away: int = 0) -> int:
        """The number of engines from now on. `num_engines` were asked for the last time; `engines` are those of them
        that serve, and `num_away` have served and are restarted. Until these are back none goes: what they had to do
        waits for them. Engines that are not there yet keep nobody: there may be no room for them."""
        num_engines = self._within_bounds(num_engines)
        load = engines_needed(engines)
        wanted = self._within_bounds(_ceil(load))
        if wanted > num_engines:
            self._spare_since = None
            if self._busy_since is None:
                self._busy_since = now
            if now - self._busy_since < self._upscale_delay_s:
                return num_engines
            self._busy_since = None
            return wanted
        self._busy_since = None
        if num_away:
            self._spare_since = None
            return num_engines
        if self._min == 0 and engines and all(e.idle_s >= self._idle_s for e in engines):
            return 0
        return self._without_spare(max(1, self._within_bounds(_ceil(load / SPARE))), num_engines, now)

    def _without_spare(self, needed: int, num_engines: int, now: float) -> int:
        """As many as were ever needed during the delay."""
        if needed >= num_engines:
            self._spare_since = None
            return num_engines
        if self._spare_since is None:
            self._spare_since, self._most_needed = now, needed
        self._most_needed = max(self._most_needed, needed)
        if now - self._spare_since < self._downscale_delay_s:
            return num_engines
        self._spare_since = None
        return self._most_needed

    def _within_bounds(self, num_engines: int) -> int:
        return max(self._min, min(self._max, num_engines))


def _ceil(value: float) -> int:
    return math.ceil(value - 1e-9)  # a sum of floats may be a little above a whole number


# ---- Serve's side ----------------------------------------------------------------------------------------------------

_SERVES = "serves"  # 1 in the report of an engine that has figures


def report_of(figures: EngineFigures | None) -> dict[str, float]:
    """The numbers by which a replica tells Serve of its engine, which may be away."""
    return {_SERVES: 0.0} if figures is None else {_SERVES: 1.0, **asdict(figures)}


class ServePolicy:
    """A ScalingPolicy as Serve calls it, which alone delays and bounds what it decides."""

    def __init__(self, **settings: float) -> None:
        """`settings` are those of ScalingPolicy."""
        self._policy = ScalingPolicy(**settings)  # type: ignore[arg-type]

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        engines = _reported(context)
        num_away = len(context.running_replicas) - len(engines)
        # Serve's own clock jumps where the machine's is set.
        return self._policy.decide(engines, context.target_num_replicas, time.monotonic(), num_away), {}


def _reported(context: AutoscalingContext) -> list[EngineFigures]:
    """The figures that replicas reported last, without those whose engines are away."""
    series = context.raw_metrics or {}
    found = []
    for replica in context.running_replicas:
        last = {name: of[replica][-1].value for name, of in series.items() if of.get(replica)}
        if last.get(_SERVES):
            found.append(EngineFigures(**{field.name: last[field.name] for field in fields(EngineFigures)}))
    return found
