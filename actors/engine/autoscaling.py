"""The number of engines that an application needs: a policy over their load, and its shell for Serve.

The policy is pure: it maps engine figures and a time to a number of engines. Serve pickles this module by value
into its controller, which may lack our packages. So the module imports only the standard library."""

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

MAX_PROMPT_WAIT_S = 2.0  # the waiting prompts should be computed within this
MAX_ROW_SHARE = 0.8  # share of an engine's rows
MAX_BLOCK_SHARE = 0.9  # share of an engine's KV blocks
# Engines end if the others would use at most this share of the limits above: 60 % of the rows.
SCALE_IN_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The load and the limits of one engine."""

    queued_tokens: float  # prompt tokens still to be computed
    prefill_rate: float  # prompt tokens a second; 0 if unknown
    num_live: float  # requests that run or wait
    max_rows: float  # requests that can run at a time
    num_used_blocks: float
    num_blocks: float
    idle_s: float  # since it last had a request
    keep_s: float = -1.0  # the idle time after which it may end; negative for the application's own

    @classmethod
    def of(cls, scheduler: Scheduler, load: EngineLoad, prefill_rate: float, idle_s: float) -> EngineFigures:
        """Return the figures of the engine with this scheduler."""
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
    """Return the number of engines like these that the load needs, as a fraction."""
    if not engines:
        return 0.0
    num_engines, num_live = len(engines), sum(e.num_live for e in engines)
    rates = [e.prefill_rate for e in engines if e.prefill_rate > 0]
    backlog = sum(e.queued_tokens for e in engines) * len(rates) / (MAX_PROMPT_WAIT_S * sum(rates)) if rates else 0.0
    return max(
        min(backlog, num_live),  # one engine computes a prompt, whatever its length
        num_engines * num_live / (MAX_ROW_SHARE * sum(e.max_rows for e in engines)),
        num_engines * sum(e.num_used_blocks for e in engines) / (MAX_BLOCK_SHARE * sum(e.num_blocks for e in engines)),
    )


class ScalingPolicy:
    """Decides repeatedly, and remembers since when there are too few or too many engines."""

    def __init__(
        self,
        min_engines: int,
        max_engines: int,
        upscale_delay_s: float = 2.0,
        downscale_delay_s: float = 120.0,
        idle_s: float = 300.0,
        least_awake_s: float = 0.0,
    ) -> None:
        """Args:
        upscale_delay_s: time of high load before engines start.
        downscale_delay_s: time of low load before engines end.
        idle_s: time without requests before the last engine ends, if `min_engines` is 0.
        least_awake_s: time for which the first engine stays; Serve would start another one for its latest calls."""
        self._min, self._max = min_engines, max_engines
        self._upscale_delay_s, self._downscale_delay_s, self._idle_s = upscale_delay_s, downscale_delay_s, idle_s
        self._least_awake_s, self._awake_since = least_awake_s, math.inf  # infinite without an engine
        self._busy_since: float | None = None
        self._spare_since: float | None = None  # since when fewer engines would do
        self._most_needed = 0  # engines, since then

    def decide(self, engines: Sequence[EngineFigures], num_engines: int, now: float, num_restarting: int = 0) -> int:
        """Return the number of engines from now on.

        Args:
        engines: the figures of the engines that serve.
        num_engines: the last decision.
        num_restarting: engines that served and restart now. Their load waits for them, so no engine ends meanwhile.

        Engines that have not started yet do not prevent a scale-in: the cluster may lack room for them."""
        num_engines = self._within_bounds(num_engines)
        self._awake_since = min(self._awake_since, now) if engines else math.inf
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
        if num_restarting:
            self._spare_since = None
            return num_engines
        is_settled = now - self._awake_since >= self._least_awake_s
        if self._min == 0 and engines and is_settled and all(self._may_end(e) for e in engines):
            return 0
        return self._scale_in(max(1, self._within_bounds(_ceil(load / SCALE_IN_SHARE))), num_engines, now)

    def _may_end(self, engine: EngineFigures) -> bool:
        return not engine.num_live and engine.idle_s >= (self._idle_s if engine.keep_s < 0 else engine.keep_s)

    def _scale_in(self, needed: int, num_engines: int, now: float) -> int:
        """Return the most engines that were needed during the delay, or the current number until it has passed."""
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
    return math.ceil(value - 1e-9)  # floats may add up to slightly above an integer


# ---- Serve's side ----------------------------------------------------------------------------------------------------

_SERVES = "serves"  # 1 in the report of an engine that has figures


def report_of(figures: EngineFigures | None) -> dict[str, float]:
    """Return the numbers that a replica reports to Serve. `figures` is None while its engine restarts."""
    return {_SERVES: 0.0} if figures is None else {_SERVES: 1.0, **asdict(figures)}


class ServePolicy:
    """A ScalingPolicy as Serve calls it. All delays and bounds are the policy's own."""

    def __init__(self, **settings: float) -> None:
        """`settings` are the arguments of ScalingPolicy."""
        self._policy = ScalingPolicy(**settings)  # type: ignore[arg-type]

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        engines = _reported(context)
        num_restarting = len(context.running_replicas) - len(engines)
        # Serve's own clock jumps when the machine's clock is set.
        return self._policy.decide(engines, context.target_num_replicas, time.monotonic(), num_restarting), {}


def _reported(context: AutoscalingContext) -> list[EngineFigures]:
    """Return the figures that replicas reported last, without restarting engines."""
    series = context.raw_metrics or {}
    found = []
    for replica in context.running_replicas:
        last = {name: of[replica][-1].value for name, of in series.items() if of.get(replica)}
        if last.get(_SERVES):
            found.append(EngineFigures(**{field.name: last[field.name] for field in fields(EngineFigures)}))
    return found
