"""One simulated engine: the real scheduler, block pool, prefix cache and pacing over a device that is a table of times.

Steps are planned and committed as the engine's loop does it, two in flight and late (runtime/core/engine.py). Where
nothing waits and all rows decode, nothing can change until a row ends or a request arrives. Such steps are one plan of
many (`Scheduler.schedule(max_steps)`), made when their number is known.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from math import inf, sqrt
from typing import Any

import numpy as np

from actors.engine.cache_feed import CacheFeed
from actors.front.router import Prompt
from benchmarks.simulate.step_times import StepTimes
from benchmarks.simulate.traces import Job
from runtime.assembly.engine import extras_of
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import FinishReason, Request, SamplingParams
from runtime.core.block_pool import NULL_BLOCK
from runtime.core.plan import StepPlan, StepResult
from runtime.core.prefix_cache import hash_blocks, root_hash
from runtime.core.request_state import RequestState
from runtime.core.scheduler import Scheduler
from runtime.policy.step_pacing import StepPacing

EOS, WORD = 0, 1  # an answer is words and ends with EOS
VOCAB_SIZE = 1 << 17
GAP_S = 1e-5  # resolution of gaps between tokens
_LEAST_STEPS = 3  # smaller numbers are planned one by one
_WORDS = np.full(1 << 20, WORD, np.int32)


@cache
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens)


@dataclass(slots=True)
class Gaps:
    """Times between tokens in a request, over all requests: how often each was seen, in units of GAP_S."""

    counts: Counter[int] = field(default_factory=Counter)

    def percentile(self, share: float) -> float:
        """Seconds; 0.0 without any."""
        left = share * self.counts.total()
        for gap in sorted(self.counts):
            left -= self.counts[gap]
            if left <= 0:
                return gap * GAP_S
        return 0.0


@dataclass(slots=True)
class Stretch:
    """Steps that only decode `num_rows` rows. They go on for `num_steps` unless a request arrives."""

    begin: float
    first_s: float  # the first step's time
    more_s: float  # the difference between each step and the one before
    num_rows: int
    num_steps: int

    def end(self, num_steps: int) -> float:
        """The time at which `num_steps` of them are done."""
        return self.begin + num_steps * self.first_s + self.more_s * (num_steps * (num_steps - 1) / 2)

    def num_done(self, now: float) -> int:
        """Steps that are done by then."""
        a, b, passed = self.more_s / 2, self.first_s - self.more_s / 2, now - self.begin
        num = int(passed / b) if a == 0 else int((sqrt(b * b + 4 * a * passed) - b) / (2 * a))
        return min(num + 1 if self.end(num + 1) <= now else num, self.num_steps)


class SimulatedEngine:
    """`now` is its own time, which lags behind the simulation's while nothing visible happens.

    `next_at` is when `advance` should be called again; `on_end(job, state, now)` is called for each answer that
    ends."""

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        info: ModelInfo,
        times: StepTimes,
        on_end: Callable[[Job, RequestState, float], None],
        gaps: Gaps,
        begin: float = 0.0,
        merge: bool = True,
    ) -> None:
        """Without `merge` every step is planned alone."""
        self.name, self.times, self.now, self.next_at = name, times, begin, inf
        self.scheduler = Scheduler(
            config, info, [StepPacing(config.max_itl_ms, lambda: self.now), *extras_of(config, info)]
        )
        self._on_end, self.gaps, self._merge = on_end, gaps, merge
        self._config, self._depth, self._late = config, config.pipeline_depth, config.late_planning
        self._in_flight: deque[tuple[float, StepPlan, float]] = deque()  # end, plan, time per step
        self._free_at = begin  # when the device has done all that is in flight
        self._stretch: Stretch | None = None
        self._ends = [0] * self.scheduler.max_num_seqs  # the number of tokens with which its request ends, by slot
        self.num_steps = 0
        self.feed = CacheFeed(self.scheduler)
        self.last_streams: list[int] = []  # last stream from each front
        self.told_at = -inf  # when the fronts got the cache and the load; inf if their next report is scheduled
        self.watched_at = -inf  # the last `next_at` that the simulation recorded
        self.busy_at = begin  # when an answer ended

    # ---- requests -------------------------------------------------------------------------------------------------

    def is_full(self, num_tokens: int) -> bool:
        """True if a prompt with `num_tokens` tokens is beyond the queue's limits (actors/engine/loop.py)."""
        config, waiting = self._config, self.scheduler.waiting
        too_long = waiting.num_tokens + num_tokens > config.max_queued_tokens
        return len(waiting) >= config.max_queued_requests or (len(waiting) > 0 and too_long)

    def add(self, job: Job, token_ids: array[int], now: float, block_hashes: Sequence[bytes] = ()) -> None:
        """A request arrives: its prompt and, if it comes from another engine, its answer so far. `block_hashes` are the
        known hashes of its leading blocks."""
        self.advance(now)
        self._interrupt(now)
        if self._in_flight:
            self._plan(merge=False)  # the step after the running one may be planned already, without this request
        tokens: Any = token_ids  # an array, not a list, because prompts are long
        request = Request(str(job.number), tokens, job.prompt_len, _params(job.max_tokens), cache_salt=job.salt)
        self.scheduler.add(request, job, block_hashes)
        self.advance(now)

    def warm(self, prompt: Prompt, computed: set[bytes]) -> int:
        """Add to the cache the missing ones of a prompt's blocks that are `computed`, and record that all will be.
        Returns the tokens that a request with this prompt finds."""
        kv_cache, size = self.scheduler.kv_cache, self.scheduler.block_size
        root = root_hash(self.scheduler.info.fingerprint, prompt.salt)
        num_tokens = (len(prompt.token_ids) - 1) // size * size
        hashes = hash_blocks(root, array("i", prompt.token_ids[:num_tokens]), size)
        known = list(takewhile(computed.__contains__, hashes))
        computed.update(hashes)
        hits = kv_cache.cache.match_prefix(known)
        pool = kv_cache.pool
        pool.acquire(hits)
        blocks = pool.allocate(min(pool.num_available, len(known) - len(hits)))
        parent = hits[-1] if hits else NULL_BLOCK
        for block, block_hash in zip(blocks, known[len(hits) :], strict=False):
            kv_cache.cache.insert([block_hash], [block])
            pool.mark_cached([(block, block_hash, parent)])
            parent = block
        pool.release(hits + blocks)
        return (len(hits) + len(blocks)) * size

    def take_all(self, now: float) -> list[tuple[Job, array[int]]]:
        """The engine ends, or its streams leave it: return all live requests, each with its known tokens."""
        self.advance(now)
        self._interrupt(now, is_last=True)
        self.next_at = inf
        return [(state.owner, state.tokens) for state in self.scheduler.requests.values()]

    # ---- time -----------------------------------------------------------------------------------------------------

    def advance(self, until: float) -> None:
        """All that happens up to and including this time."""
        while True:
            at = self._plan()
            if self._stretch is not None:
                at = self._stretch.end(self._stretch.num_steps)
            elif self._in_flight:
                at = min(at, self._in_flight[0][0])
            if at > until:
                self.now, self.next_at = max(self.now, until), at
                return
            self.now = at
            if self._stretch is not None:
                self._end_stretch(self._stretch.num_steps)
            if self._in_flight and self._in_flight[0][0] <= at:
                self._commit()

    def _plan(self, merge: bool = True) -> float:
        """Fill the pipeline; returns when the next step is to be planned, if that is later."""
        scheduler = self.scheduler
        while self._stretch is None and scheduler.requests and len(self._in_flight) < self._depth:
            if merge and self._only_decodes() and (self._in_flight or self._begin_stretch()):
                break  # the stretch begins at the end of a step in flight
            if self._late and (delay_s := scheduler.planning_delay_s()) > 0:
                return self.now + delay_s
            if not self._submit(max(self._free_at, self.now + self.times.launch_us / 1e6)):
                break
        return inf

    def _only_decodes(self) -> bool:
        """Nothing can change until a row ends or a request arrives."""
        scheduler = self.scheduler
        return (
            self._merge
            and not len(scheduler.waiting)
            and all(state.num_total - state.num_computed <= 1 for state in scheduler.running)
        )

    def _submit(self, begin: float) -> bool:
        """Plan one step, which the device begins then; False if there is no work."""
        if (step := self.scheduler.schedule()) is None:
            return False
        for new, state in zip(step.plan.new, step.admitted, strict=True):
            self._ends[new.slot] = state.prompt_len + state.owner.output_len
        step_s = self.times.step_s(step.plan)
        self._free_at = begin + step_s
        self._in_flight.append((self._free_at, step.plan, step_s))
        return True

    def _begin_stretch(self) -> bool:
        """Let time pass over steps of the rows that run; False if they are too few."""
        running, num_rows = self.scheduler.running, len(self.scheduler.running)
        if not num_rows:
            return False
        num_steps = min(s.prompt_len + s.owner.output_len - s.num_total for s in running)
        block_size = self.scheduler.block_size
        num_steps = min(num_steps, (self.scheduler.pool.num_available // num_rows - 1) * block_size)
        if num_steps < _LEAST_STEPS:
            return False
        begin = max(self._free_at, self.now)
        first_s = self.times.decode_s(num_rows, sum(s.num_total for s in running))
        self._stretch = Stretch(begin, first_s, self.times.position_us * num_rows / 1e6, num_rows, num_steps)
        return True

    def _interrupt(self, now: float, is_last: bool = False) -> None:
        """Make the engine's state visible: plan the steps of a stretch up to the running one, which must end first.
        With `is_last` the running step no longer counts."""
        if self._stretch is None:
            return
        num_done = self._stretch.num_done(now)
        if is_last or num_done == self._stretch.num_steps:
            self._end_stretch(num_done)
        else:
            self._submit_stretch(num_done + 1)
        self.now = now

    def _end_stretch(self, num_steps: int) -> None:
        if num_steps:
            self._submit_stretch(num_steps)
            self.now = self._in_flight[0][0]
            self._commit()
        self._stretch = None

    def _submit_stretch(self, num_steps: int) -> None:
        """Plan `num_steps` steps of the stretch at once, at the time at which the last one would have been planned."""
        stretch, self._stretch = self._stretch, None
        assert stretch is not None
        self.now = stretch.end(num_steps - 1)
        step = self.scheduler.schedule(num_steps)
        assert step is not None
        assert step.plan.num_steps == num_steps, "a stretch fits into the engine's memory"
        self._free_at = stretch.end(num_steps)
        self._in_flight.append((self._free_at, step.plan, (self._free_at - stretch.begin) / num_steps))

    # ---- results --------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        end, plan, step_s = self._in_flight.popleft()
        self.num_steps += plan.num_steps
        # Plans have few rows: lists are faster than arrays here.
        rows = zip(plan.slots.tolist(), plan.ends.tolist(), plan.num_samples.tolist(), strict=True)
        ends = [last + plan.num_steps >= self._ends[slot] for slot, last, num_samples in rows if num_samples]
        token_ids = _WORDS[: len(ends) * plan.num_steps].copy()
        for row, is_end in enumerate(ends, start=1):
            if is_end:
                token_ids[row * plan.num_steps - 1] = EOS
        output = self.scheduler.commit(StepResult(plan.step_id, token_ids))
        counts, first_end = self.gaps.counts, end - (plan.num_steps - 1) * step_s
        if plan.num_steps > 1:
            counts[round(step_s / GAP_S)] += len(output.states)
        for state in output.states[:: plan.num_steps]:
            job: Job = state.owner
            if job.first_at is None:
                job.first_at, job.num_cached = first_end, state.num_cached or 0
            elif plan.num_steps == 1:
                counts[round((end - job.last_at) / GAP_S)] += 1
            job.last_at = end
        for state, reason in output.finished:
            assert reason in (FinishReason.STOP, FinishReason.LENGTH)
            self.busy_at = end
            self._on_end(state.owner, state, end)
