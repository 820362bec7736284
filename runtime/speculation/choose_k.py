"""Guessing how a request goes on, and when that pays.

The target samples with noise by position (C4), so a guess is right exactly if it equals the token that the target
itself samples there; nothing is resampled, and with or without guesses the tokens are the same (arXiv 2408.07978).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol

from runtime.core.extra import Ended, Extra
from runtime.core.plan import MAX_DRAFT_TOKENS, StepResult
from runtime.core.request_state import RequestState, RequestStatus
from runtime.core.step import Step
from runtime.spec.types import FinishReason, StepOutput

# The estimate chooses no more: with the known token these are eight rows, which few-row products take at once.
_MAX_CHOSEN_TOKENS = 7
_MAX_ACCEPTANCE = 0.975  # a higher estimate counts as this
_LEAST_LIKELY = 0.1  # a draft token that is right less often is not worth its place in a step
_LIKELY_TOKENS = [  # draft tokens of a row that are likely enough, by its acceptance in 40ths
    next((n for n in range(MAX_DRAFT_TOKENS, 0, -1) if (i / 40) ** n >= _LEAST_LIKELY), 0) for i in range(41)
]
_FIRST_ACCEPTANCE = 0.7  # before anything is known: with a lower one, a large batch would never find out
_RESTED_ACCEPTANCE = 0.6  # the least to which that of a request that rests drifts back
_WEIGHT, _OVERALL_WEIGHT = 0.05, 0.01  # of the newest draft token in a request's estimate, and in that of all requests
_BEYOND_WEIGHT = 0.2  # of the newest step in the estimate of what steps take beyond the model's time
# Once in so many steps that estimate drifts to its first value, by this share, so that what did not pay is tried again;
# in larger batches, where a try costs more, by less.
_DRIFT_EVERY, _DRIFT, _DRIFT_ROWS = 16, 0.016, 8
_COARSE_US = 50.0  # what that estimate is rounded to
_MOST_SURPRISE = 0.5  # of a step's time: more of a difference is a pause, a compiler, another process
_REST_WEIGHT = 0.01  # of the way back, per token decoded without draft tokens: after some 100 it is tried again


class Drafter(Protocol):
    """Where guesses come from. Called by the step thread alone. One that has its guesses at once, as these defaults
    have it, only needs `guess` and `forget`."""

    @property
    def is_ready(self) -> bool:
        """True if it can guess now."""
        return True

    def begin_step(self) -> None:
        """A step is about to be planned."""
        return

    def step_us(self, num_rows: int) -> float:
        """Microseconds that one more draft token for each of so many rows takes."""
        return 0.0

    def follows(self, state: RequestState, wanted: int) -> bool:
        """True if guesses for this request can be asked for; if not yet, the drafter begins to see to it."""
        return True

    def ask(self, state: RequestState, wanted: int) -> None:
        """A followed request has no token in flight, and up to `wanted` guesses are worth having for its next row."""
        return

    def poll(self) -> bool:
        """True if draft tokens that were asked for are on their way, and should be waited for."""
        return False

    def wait(self) -> None:
        """Until nothing is due any more."""
        return

    def is_busy(self) -> bool:
        """True if it may be computing beside the steps, which then take longer."""
        return False

    def stats(self) -> dict[str, float]:
        """Figures of its own."""
        return {}

    @abstractmethod
    def guess(self, state: RequestState, most: int) -> list[int] | None:
        """Up to `most` tokens that may follow the request's known ones; empty: it has no idea; None: it does not tell.
        Never waits."""
        ...

    @abstractmethod
    def forget(self, state: RequestState) -> None:
        """The request has ended."""
        ...


class StepTimes:
    """Time of a step by its size, between what was measured, and beyond it in proportion."""

    def __init__(self, step_us: Sequence[tuple[int, float]]) -> None:
        """step_us: (size, microseconds), rising; empty: a microsecond each."""
        self._points = tuple(step_us) or ((1, 1.0),)

    def us(self, size: int) -> float:
        """Microseconds."""
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
    num_draft_tokens: int  # of the row with the most

    @classmethod
    def of(cls, step: Step) -> DecodeShape | None:
        """Return the size of a step; None if it computes prompts, too."""
        if step.num_sampled != step.num_tokens or step.new:
            return None
        return cls(len(step.rows), step.num_tokens, max(len(drafts) for _, _, drafts in step.sampled_rows))


class Speculation(Extra):
    """Chooses how many draft tokens a request gets: as many as its acceptance so far and the time of a step let pay.

    What steps with and without guesses take beyond the model's and the drafter's own time (waiting, planning, a GPU
    that two processes share) is learned from the time between results, by size of the batch."""

    def __init__(
        self,
        drafter: Drafter,
        fixed: int | None,
        step_us: Sequence[tuple[int, float]],
        latency_us: float,
        clock: Callable[[], float] | None = None,
        row_us: float = 0.0,
    ) -> None:
        """`fixed` guesses always, or by estimate. step_us: (tokens, time of a step of so many rows), rising.
        `latency_us`, and `row_us` for each row, is a first guess at what a round takes beyond that; without a clock, in
        seconds, it stays."""
        self.drafter, self._fixed, self._clock = drafter, fixed, clock
        self._latency_us, self._row_us = latency_us, row_us
        self._times = StepTimes(step_us)
        self.acceptance = _FIRST_ACCEPTANCE  # running estimate over all requests
        # What steps take beyond the estimate: with guesses, without; by the number of bits of the number of rows.
        self._beyond_us: tuple[dict[int, float], dict[int, float]] = ({}, {})
        self._stepped_at, self._was_requested = 0.0, False
        self._num_rows, self._rounded = 0, (latency_us, 0.0)
        self._num_begun = 0
        self.round_count = 0  # guesses of a row in the step that is being planned; 0: it does not pay
        self._best = lru_cache(maxsize=4096)(self._compute_best)
        self._acceptance: dict[RequestState, float] = {}  # of each live request, once there is an estimate

    def on_end(self, state: RequestState, reason: FinishReason) -> None:
        self._acceptance.pop(state, None)
        self.drafter.forget(state)

    def on_idle(self) -> None:
        self.drafter.wait()

    def on_result(self, step: Step, result: StepResult, output: StepOutput) -> Ended:
        if self._clock is not None:
            self.observe_step(DecodeShape.of(step))
        return []

    def planning_delay_s(self, step: Step) -> float:
        return 0.0  # draft tokens are requested as soon as a step ends

    @property
    def is_drafting(self) -> bool:
        return self.round_count > 0

    def stats(self) -> dict[str, float]:
        """The estimates by which the count is chosen, in a batch of the last step's size."""
        return {
            "acceptance": self.acceptance,
            "round_beyond_us": self._rounded[0],
            "step_beyond_us": self._rounded[1],
            **self.drafter.stats(),
        }

    def begin_step(self, running: Sequence[RequestState]) -> bool:
        """A step is about to be planned: ask for its guesses. True: they should be waited for, or those in flight, so
        that all rows stay in one step."""
        drafter, rested = self.drafter, self.round_count == 0
        drafter.begin_step()
        self.choose_k(len(running), self._mean_acceptance(running))
        if self.round_count == 0 and rested and drafter.is_ready:
            return False  # nothing was asked, and nothing is in flight
        if any(state.status is RequestStatus.VERIFYING for state in running):
            return True
        for state in running if self.round_count else ():
            count = self._count(state)
            is_known = state.num_total == len(state.tokens) == state.num_computed + 1
            if count > 0 and drafter.follows(state, count) and is_known:
                drafter.ask(state, count)
                self._was_requested = True
        return drafter.poll()

    def choose_k(self, num_rows: int, acceptance: float) -> None:
        """A step of about so many rows is being planned; their mean acceptance."""
        self._num_begun += 1
        drift = _DRIFT * min(1.0, _DRIFT_ROWS / max(1, num_rows)) if self._num_begun % _DRIFT_EVERY == 0 else 0.0
        if drift or num_rows != self._num_rows:
            self._num_rows, size = num_rows, num_rows.bit_length()
            for beyond, first in zip(self._beyond_us, self._first_overhead_us(num_rows), strict=True):
                known = beyond.setdefault(size, first)
                beyond[size] = known + drift * (first - known)
            round_us, step_us = (round(beyond[size] / _COARSE_US) * _COARSE_US for beyond in self._beyond_us)
            self._rounded = round_us, step_us
        if not self.drafter.is_ready:
            self.round_count = 0
        elif self._fixed is not None:
            self.round_count = self._fixed
        else:
            draft_us = self.drafter.step_us(num_rows)
            self.round_count = self._best(num_rows, draft_us, self._rounded, round(acceptance * 40))

    def _first_overhead_us(self, num_rows: int) -> tuple[float, float]:
        """First estimates of what rounds, and steps without drafts, take beyond the models' times."""
        return self._latency_us + num_rows * self._row_us, 0.0

    def _mean_acceptance(self, running: Sequence[RequestState]) -> float:
        """Requests that rest drift back, to the estimate of all if that is good: a run of wrong guesses comes with good
        drafts, too, and where one costs much, less would never bring it back."""
        draft_us = self.drafter.step_us(len(running))
        if self._fixed is not None or not running or not self._best(len(running), draft_us, self._rounded, 40):
            return 1.0  # it makes no difference
        total, usual = 0.0, max(_RESTED_ACCEPTANCE, self.acceptance)
        for state in running:
            known = self._acceptance.get(state)
            if known is None:
                known = self._acceptance[state] = self.acceptance
            elif self._count(state) <= 0:
                known += _REST_WEIGHT * (usual - known)
                self._acceptance[state] = known
            total += known
        return total / len(running)

    def defers(self, state: RequestState) -> bool:
        """True if a request whose last token is in flight is left out of this step, to get draft tokens in the next."""
        count = self._count(state)
        return count > 0 and self.drafter.follows(state, count)

    def drafts(self, state: RequestState, most: int) -> list[int]:
        """At most `most` tokens that may follow the request's known ones; empty if that would not pay."""
        count = min(most, self._count(state))
        if count <= 0 or (guesses := self.drafter.guess(state, count)) is None:
            return []
        if not guesses:
            self.record(state, False)
        return guesses

    def on_verified(self, state: RequestState, num_accepted: int, rejected: bool) -> None:
        for _ in range(num_accepted):
            self.record(state, True)
        if rejected:
            self.record(state, False)

    def record(self, state: RequestState, right: bool) -> None:
        """A guess was right, or wrong, or there was none; those after a wrong one tell nothing."""
        known = self._acceptance.get(state, self.acceptance)
        self._acceptance[state] = known + _WEIGHT * (right - known)
        self.acceptance += _OVERALL_WEIGHT * (right - self.acceptance)

    def observe_step(self, shape: DecodeShape | None) -> None:
        """A result has come in, of a step that only decoded if it has a shape."""
        if self._clock is None:
            return
        now = self._clock()
        took_us, self._stepped_at = (now - self._stepped_at) * 1e6, now
        if shape is None:
            return
        num_rows, num_tokens, count = shape
        was_asked, self._was_requested = self._was_requested, False
        if not count and (was_asked or self.drafter.is_busy()):
            return  # it waited for nothing, or shared a GPU: plain steps would seem slow, and rounds pay by that
        expected_us = self._times.us(num_tokens) + (count and count * self.drafter.step_us(num_rows))
        beyond, size, most = self._beyond_us[count == 0], num_rows.bit_length(), _MOST_SURPRISE * expected_us
        known = beyond.setdefault(size, self._first_overhead_us(num_rows)[count == 0])
        beyond[size] += _BEYOND_WEIGHT * min(max(took_us - expected_us - known, -most), most)
        if count:
            self._num_rows = 0  # `choose_k` looks again

    def _count(self, state: RequestState) -> int:
        """Of a round's guesses, those of a request that are likely enough; its last token is never guessed."""
        most = min(self.round_count, state.max_len - state.num_total - 1)
        if self._fixed is not None or most <= 0:
            return most
        known = self._acceptance.setdefault(state, self.acceptance)
        return min(most, _LIKELY_TOKENS[round(known * 40)])

    def _compute_best(
        self, num_rows: int, draft_us: float, beyond_us: tuple[float, float], acceptance_40ths: int
    ) -> int:
        """The count that yields the most tokens a second if all rows are alike; 0 if plain steps do."""
        rate = min(acceptance_40ths / 40, _MAX_ACCEPTANCE)
        round_us, step_us = beyond_us
        best, most = 0, 1 / max(1.0, self._times.us(num_rows) + step_us)
        for count in range(1, _MAX_CHOSEN_TOKENS + 1):
            tokens = (1 - rate ** (count + 1)) / (1 - rate)
            speed = tokens / max(1.0, round_us + count * draft_us + self._times.us(num_rows * (1 + count)))
            if speed > most:
                best, most = count, speed
        return best
