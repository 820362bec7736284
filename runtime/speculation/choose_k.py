"""Speculation: chooses how many draft tokens a row gets, and learns from the verified ones.

The target samples with noise by position (C4), so a draft token is accepted if it equals the target's own sample.
Nothing is resampled: the tokens are the same with and without draft tokens (arXiv 2408.07978).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol

from runtime.base.types import MAX_DRAFT_TOKENS, MAX_MATCHED_TOKENS, FinishReason
from runtime.core.extra import Extra
from runtime.core.plan import StepResult
from runtime.core.request_state import RequestState, RequestStatus
from runtime.core.step import Step
from runtime.speculation.acceptance import Acceptance

# The usual most that are chosen: with the known token these are eight rows, which a few-row product computes at once.
MAX_CHOSEN_TOKENS = 7
_OVERHEAD_WEIGHT = 0.2  # weight of the newest step in the overhead estimate
# Every _DRIFT_EVERY steps it drifts to its first value, so that drafting is tried again. It drifts less above
# _DRIFT_ROWS rows, where a try costs more.
_DRIFT_EVERY, _DRIFT, _DRIFT_ROWS = 16, 0.016, 8
_COARSE_US = 50.0  # the overhead estimate is rounded to multiples of this
_MOST_SURPRISE = 0.5  # share of a step's time; a larger difference comes from a pause, a compiler or another process
_TRY_SHARE = 0.01  # share of decoding time for tries with one more draft token
_TRY_STEPS, _TRY_ROWS = 4, 8  # most steps of a try, and more rows that it takes in small batches


class Drafter(Protocol):
    """A source of draft tokens. Only the step thread calls it.

    A drafter that has its draft tokens at once needs only `guess` and `forget`; the defaults here do the rest."""

    most: int = MAX_DRAFT_TOKENS  # draft tokens of a row
    most_chosen: int = MAX_CHOSEN_TOKENS  # the same if the number follows from the estimate
    in_runner: bool = False  # the runner makes the draft tokens in the step before
    # Each kind's first acceptance estimate. With a lower one than this, a large batch would never try to draft.
    first_acceptance: Sequence[float] = (0.7,)

    @property
    def is_ready(self) -> bool:
        """True if it can draft now."""
        return True

    def on_result(self, step: Step, result: StepResult) -> None:
        """A result arrives, before its tokens are committed."""
        return

    def begin_step(self) -> None:
        """A step is about to be planned."""
        return

    def on_weights(self) -> None:
        """The next step runs with other weights."""
        return

    def kind(self, state: RequestState) -> int | None:
        """Return the kind of the draft tokens that the request would get now; None if it would get none."""
        return 0

    def step_us(self, num_rows: int) -> float:
        """Return the microseconds for one more draft token in each of `num_rows` rows."""
        return 0.0

    def follows(self, state: RequestState, wanted: int) -> bool:
        """Return True if draft tokens can be requested for this request; if not, prepare for it."""
        return True

    def ask(self, state: RequestState, wanted: int) -> None:
        """Request up to `wanted` draft tokens for the next row of a followed request without tokens in flight."""
        return

    def poll(self) -> bool:
        """Return True if requested draft tokens are on their way, and the next step should wait for them."""
        return False

    def wait(self) -> None:
        """Wait until no draft tokens are due."""
        return

    def is_busy(self) -> bool:
        """Return True if it may be computing during the steps, which then take longer."""
        return False

    def stats(self) -> dict[str, float]:
        """Return figures of this drafter."""
        return {}

    @abstractmethod
    def guess(self, state: RequestState, most: int) -> list[int] | None:
        """Return up to `most` tokens that may follow the request's known ones, without waiting.

        An empty list counts as a rejected draft token. None means that no reply is there, and does not count."""
        ...

    @abstractmethod
    def forget(self, state: RequestState) -> None:
        """Drop the records of a request that has ended."""
        ...


class StepTimes:
    """Time of a step by its size: interpolated between measured sizes, and in proportion above the largest."""

    def __init__(self, step_us: Sequence[tuple[int, float]]) -> None:
        """step_us: (size, microseconds), rising. If it is empty, each token counts as a microsecond."""
        self._points = tuple(step_us) or ((1, 1.0),)
        self.largest = self._points[-1][0]  # size that was measured

    def us(self, size: int) -> float:
        """Return the microseconds that a step of this size takes."""
        points = self._points
        if size <= points[0][0]:
            return points[0][1]
        for (a, low), (b, high) in pairwise(points):
            if size <= b:
                return low + (high - low) * (size - a) / (b - a)
        return points[-1][1] * size / points[-1][0]


class DecodeShape(NamedTuple):
    """The size of a step that only decodes."""

    num_rows: int
    num_tokens: int
    num_draft_tokens: int  # draft tokens in the row with the most

    @classmethod
    def of(cls, step: Step) -> DecodeShape | None:
        """Return the size of a step; None if it computes prompts, too."""
        if step.num_sampled != step.num_tokens or step.new or not step.rows:
            return None
        return cls(len(step.rows), step.num_tokens, max(len(drafts) for _, _, drafts in step.sampled_rows))


class Speculation(Extra):
    """Chooses the number of draft tokens that yields the most tokens per second.

    It knows the acceptance of each position and the models' step times. Steps also have an overhead: waiting, planning,
    a GPU that two processes share. The overhead is learned from the time between results, by batch size, for steps with
    and without draft tokens.

    Now and then it tries one draft token more, as texts change. A try ends with the first such token that is wrong.
    All tries together cost at most `_TRY_SHARE` of the time."""

    def __init__(
        self,
        drafter: Drafter,
        fixed: int | None,
        step_us: Sequence[tuple[int, float]],
        latency_us: float,
        clock: Callable[[], float] | None = None,
        row_us: float = 0.0,
    ) -> None:
        """`fixed` is the number of draft tokens; None to choose it by estimate.

        `step_us` holds (tokens, time of a step with this many rows), rising. `latency_us`, plus `row_us` per row, is
        the first estimate of a round's overhead. `clock` returns seconds; without it the first estimate remains."""
        self.drafter, self._fixed, self._clock = drafter, fixed, clock
        self._latency_us, self._row_us = latency_us, row_us
        self._times = StepTimes(step_us)
        self.acceptance = [Acceptance(first) for first in drafter.first_acceptance]  # each kind's estimates
        # Overhead of steps with draft tokens, and without, by the row count's bit length.
        self._overhead_us: tuple[dict[int, float], dict[int, float]] = ({}, {})
        self._stepped_at, self._was_requested = 0.0, False
        self._num_rows, self._rounded = 0, (latency_us, 0.0)
        self._num_begun = 0
        self.round_count = 0  # draft tokens per row in the step that is being planned; 0 if drafting does not pay
        self._best = 0  # the same without a try
        self._try_us = 0.0  # what tries may cost now
        self._tried, self._steps_left = 0, 0  # draft tokens per row in a try, and its steps
        self._times_of = lru_cache(maxsize=1024)(self._round_times)
        self._drafted: dict[RequestState, int] = {}  # the kind of each request's last draft tokens

    def on_end(self, state: RequestState, reason: FinishReason) -> None:
        for acceptance in self.acceptance:
            acceptance.forget(state)
        self._drafted.pop(state, None)
        self.drafter.forget(state)

    def on_weights(self) -> None:
        self.drafter.on_weights()

    def on_idle(self) -> None:
        self.drafter.wait()

    def on_result(self, step: Step, result: StepResult) -> None:
        self.drafter.on_result(step, result)
        if self._clock is not None:
            self.observe_step(DecodeShape.of(step))

    def planning_delay_s(self, step: Step) -> float:
        return 0.0  # draft tokens are requested right after a step ends

    @property
    def is_drafting(self) -> bool:
        return self.round_count > 0

    @property
    def next_drafts(self) -> int:
        return self.round_count if self.drafter.in_runner else 0

    def stats(self) -> dict[str, float]:
        """Return the estimates behind the choice, for a batch of the last step's size."""
        return {
            "acceptance": self.acceptance[-1].rates[0],
            "verify_overhead_us": self._rounded[0],
            "step_overhead_us": self._rounded[1],
            **self.drafter.stats(),
        }

    def begin_step(self, running: Sequence[RequestState]) -> bool:
        """Request draft tokens for the step that is about to be planned.

        Returns True to wait for them, or for rows that verify, so that all rows stay in one step."""
        drafter, rested = self.drafter, self.round_count == 0
        drafter.begin_step()
        self.choose_k(running)
        if self.round_count == 0 and rested and drafter.is_ready:
            return False  # nothing is requested or in flight
        if any(state.status is RequestStatus.VERIFYING for state in running):
            return True
        for state in running if self.round_count else ():
            count = self._count(state)
            is_known = state.num_total == len(state.tokens) == state.num_computed + 1
            if count > 0 and drafter.follows(state, count) and is_known:
                drafter.ask(state, count)
                self._was_requested = True
        return drafter.poll()

    def choose_k(self, running: Sequence[RequestState]) -> None:
        """Set `round_count` for a step with about these rows."""
        num_rows = len(running)
        self._num_begun += 1
        drift = _DRIFT * min(1.0, _DRIFT_ROWS / max(1, num_rows)) if self._num_begun % _DRIFT_EVERY == 0 else 0.0
        if drift or num_rows != self._num_rows:
            self._num_rows, size = num_rows, num_rows.bit_length()
            for overheads, first in zip(self._overhead_us, self._first_overhead_us(num_rows), strict=True):
                known = overheads.setdefault(size, first)
                overheads[size] = known + drift * (first - known)
            round_us, step_us = (round(overheads[size] / _COARSE_US) * _COARSE_US for overheads in self._overhead_us)
            self._rounded = round_us, step_us
        if not self.drafter.is_ready:
            self.round_count = self._best = 0
        elif self._fixed is not None:
            self.round_count = min(self._fixed, self.drafter.most)
        else:
            times = self._times_of(num_rows, self.drafter.step_us(num_rows), self._rounded)
            self._choose(running, times[: 1 + self.drafter.most])

    def _choose(self, running: Sequence[RequestState], times: Sequence[float]) -> None:
        """Set the count from the times of rounds with 0, 1, 2 ... draft tokens a row."""
        self.round_count = self._best = 0
        surely = [1.0] * len(times)
        if best_count(times, surely) == 0:
            return  # rounds never pay at this size; requests are not looked up
        states = dict[int, list[RequestState]]()  # requests that can have draft tokens, by kind
        for state in running:
            if (kind := self.drafter.kind(state)) is not None:
                states.setdefault(kind, []).append(state)
        share = sum(map(len, states.values())) / max(1, len(running))
        if best_count(times, surely, share) == 0:
            return  # too few rows have draft tokens
        chances = [0.0] * MAX_MATCHED_TOKENS  # mean of these states
        for kind, own in states.items():
            weight = len(own) / (share * len(running))
            chances = [mean + weight * c for mean, c in zip(chances, self.acceptance[kind].chances(own), strict=True)]
        best = self._best = best_count(times, chances, share)
        if best + 1 != self._tried:
            self._steps_left = 0
        if not self._steps_left and best + 1 < len(times) and self._try_us >= times[best + 1] - times[best]:
            hoped = [*chances[:best], *[1.0] * (len(times) - best)]
            if best_count(times, hoped, share) > best:
                self._tried, self._steps_left = best + 1, _TRY_STEPS + _TRY_ROWS // len(running)
                for kind in states:
                    self.acceptance[kind].doubt(best)
        self.round_count = best
        if self._steps_left:
            self._steps_left -= 1
            self.round_count = self._tried
        for kind, own in states.items():
            for state in own:
                if self._count(state) <= 0:
                    self.acceptance[kind].rest(state)

    def _first_overhead_us(self, num_rows: int) -> tuple[float, float]:
        """Return the first overhead estimates for a step with draft tokens and a plain one."""
        return self._latency_us + num_rows * self._row_us, 0.0

    def defers(self, state: RequestState) -> bool:
        """Return True to leave a request with tokens in flight out of this step, so that the next one can draft."""
        count = self._count(state)
        return count > 0 and self.drafter.follows(state, count)

    def drafts(self, state: RequestState, most: int) -> list[int]:
        """Return at most `most` draft tokens for a row of the request; empty if they would not pay."""
        count = min(most, self._count(state))
        if count <= 0 or (guesses := self.drafter.guess(state, count)) is None:
            return []
        self._drafted[state] = self.drafter.kind(state) or 0
        if not guesses:
            self.on_verified(state, 0, True)
        return guesses

    def on_verified(self, state: RequestState, num_accepted: int, rejected: bool) -> None:
        acceptance = self.acceptance[self._drafted.get(state, 0)]
        for position in range(num_accepted):
            acceptance.record(state, position, True)
        if rejected:
            acceptance.record(state, num_accepted, False)
            if num_accepted + 1 == self._tried:
                self._steps_left = 0

    def observe_step(self, shape: DecodeShape | None) -> None:
        """Learn from the time of a result. `shape` is None if the step computed prompts."""
        if self._clock is None:
            return
        now = self._clock()
        took_us, self._stepped_at = (now - self._stepped_at) * 1e6, now
        if shape is None:
            return
        num_rows, num_tokens, count = shape
        was_asked, self._was_requested = self._was_requested, False
        self._pay_for_tries(took_us, num_rows, max(count, int(was_asked)))
        if not count and (was_asked or self.drafter.is_busy()):
            return  # the step waited in vain or shared the GPU: it is slower than a plain step
        expected_us = self._times.us(num_tokens) + (count and count * self.drafter.step_us(num_rows))
        overheads, size, most = self._overhead_us[count == 0], num_rows.bit_length(), _MOST_SURPRISE * expected_us
        known = overheads.setdefault(size, self._first_overhead_us(num_rows)[count == 0])
        overheads[size] += _OVERHEAD_WEIGHT * min(max(took_us - expected_us - known, -most), most)
        if count:
            self._num_rows = 0  # `choose_k` rounds the estimates again

    def _pay_for_tries(self, took_us: float, num_rows: int, count: int) -> None:
        """Earn `_TRY_SHARE` of a step's time, and pay its extra time over a step with the best number."""
        times = self._times_of(num_rows, self.drafter.step_us(num_rows), self._rounded)
        best = min(self._best, len(times) - 1)
        if best + 1 < len(times):
            most = max(0.0, times[best + 1] - times[best])
            self._try_us = min(self._try_us + _TRY_SHARE * took_us, most)
        if count > best:
            self._try_us -= max(0.0, took_us - times[best])

    def _count(self, state: RequestState) -> int:
        """Return how many draft tokens of a request are likely, at most the round's.

        A request's last token is never drafted."""
        most = min(self.round_count, state.max_len - state.num_total - 1)
        if self._fixed is not None or most <= 0:
            return most
        if (kind := self.drafter.kind(state)) is None:
            return 0
        return most if self._steps_left else min(most, self.acceptance[kind].num_likely(state))

    def _round_times(self, num_rows: int, draft_us: float, overhead_us: tuple[float, float]) -> tuple[float, ...]:
        """Return the microseconds for a plain step, then for rounds with 1, 2 ... draft tokens in each row."""
        round_us, step_us = overhead_us
        times = [step_us + self._times.us(num_rows)]
        for count in range(1, self.drafter.most_chosen + 1):
            size = num_rows * (1 + count)  # a graph computes as many tokens in each row
            if count > MAX_CHOSEN_TOKENS and size > self._times.largest:
                break
            times.append(round_us + count * draft_us + self._times.us(size))
        return tuple([max(1.0, us) for us in times])


def best_count(times: Sequence[float], chances: Sequence[float], share: float = 1.0) -> int:
    """Return the number of draft tokens a row that yields the most tokens per second; 0 if plain steps do.

    `times` has the time of a step with 0, 1, 2 ... draft tokens a row. `chances` has the chance of each draft token, if
    those before it are accepted. Only a `share` of the rows gets draft tokens."""
    best, most, tokens, all_right = 0, 1 / times[0], 1.0, share
    for count in range(1, len(times)):
        all_right *= chances[count - 1]
        tokens += all_right
        if tokens > most * times[count]:
            best, most = count, tokens / times[count]
    return best
