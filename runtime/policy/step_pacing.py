"""Paces steps: the prompt tokens that share a step with decoding rows, and how late the next step may be planned.

A step's expected time has three parts: the time to decode its rows, a fixed time for prompts, and a time for each
prompt token. All are medians over recent steps, so that they follow the model and the device. The parts for prompts
depend on the context. The fixed time is large for a mixture: a few prompt tokens read the weights of all experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from typing import Any, Generic, TypeVar

from runtime.core.extra import Culprit, Extra
from runtime.core.plan import StepResult
from runtime.core.queues import WaitingQueue
from runtime.core.request_state import RequestState
from runtime.core.step import Step

# Without a target, the larger of two times: this many decode steps, or this share of the prompt tokens' time. The
# share takes at most _AUTO_US, since the decoding rows wait meanwhile, and less if these outnumber the prompts. A whole
# step may always take _CALM_US: streams are still faster than reading then.
_AUTO_STEPS, _AUTO_SHARE, _AUTO_US, _CALM_US = 4.0, 0.35, 0.3e6, 0.057e6
# Tokens that add this share to the fixed time are computed even where a target allows none.
_FREE_SHARE = 0.25
# Longest step without decoding rows. A request that arrives meanwhile waits for its end.
_ALONE_US = 1.5e6
# A step's least prompt tokens: the larger count if it takes less time than a decode step. The smaller one is also
# the first count, because a token's time is not known yet.
_LEAST_TOKENS, _FIRST_TOKENS = 64, 16

# (multiple, upper limit of a step's tokens). Steps with such multiples, decoding rows included, fill a runner's
# graphs. The first multiple fills a CPU's attention tiles: the nearest one is taken, since a tile is long there.
_MULTIPLES = (16, 64), (64, 512), (128, 2048), (2048, 1 << 62)
_CONTEXT = 2048  # context tokens below which their number matters little
_EARLY_US, _EARLY_SHARE = 500.0, 0.1  # the next step is planned this long before a step's expected end


V = TypeVar("V")


class _Samples(Generic[V]):
    """A quantity's last samples. They may begin with a similar quantity's."""

    ENOUGH, COUNT = 3, 5  # samples: needed, and kept

    def __init__(self, other: _Samples[V] | None) -> None:
        """Begin with the samples of a similar quantity; None for no samples."""
        self._samples: deque[V] = deque(() if other is None else other._samples, maxlen=self.COUNT)
        self._num_own = 0  # the last ones, which are its own

    @property
    def is_known(self) -> bool:
        """True once no single sample decides."""
        return len(self._samples) >= self.ENOUGH

    def observe(self, value: V) -> None:
        self._samples.append(value)
        self._num_own = min(self._num_own + 1, self.COUNT)


class _Times(_Samples[float]):
    """A step's times, or parts of them. One sample moves the median to a neighbour at most, whatever its size."""

    median = least = 0.0  # until a sample is observed

    def observe(self, value: float) -> None:
        super().observe(value)
        rising = sorted(self._samples)
        self.median, self.least = rising[len(rising) // 2], rising[0]


class _Prompts(_Samples[tuple[int, float]]):
    """Prompt tokens of steps, and the times that they have added. All have about the same context."""

    def token_us(self, fixed_us: float) -> tuple[float, float]:
        """Return a token's time if a step has this fixed time: the median, and the least."""
        rising = sorted(_token_us(us, count, fixed_us) for count, us in self._samples)
        return rising[len(rising) // 2], rising[0]

    def count_in(self, us: float, fixed_us: float | None) -> int:
        """Return the tokens that take this time, the median over the samples.

        A sample allows twice its own tokens, or more if the time grows with their number. Few tokens are
        doubled while the fixed time is unknown: other sizes reveal it."""
        known_us, counts = fixed_us or 0.0, list[float]()
        for count, own_us in self._samples:
            by_parts = max(us - known_us, _FREE_SHARE * known_us) / _token_us(own_us, count, known_us)
            if fixed_us is None and count < _LEAST_TOKENS and own_us <= us <= _CALM_US:
                by_parts = max(by_parts, 2 * count)
            counts.append(min(by_parts, max(2 * count, us * count / own_us)))
        return int(sorted(counts)[(len(counts) - 1) // 2])

    def fixed_us(self, count: int, us: float) -> float | None:
        """Return the fixed time by a new sample and its own ones of other sizes; None if these are too few."""
        found = []
        for other, other_us in list(self._samples)[len(self._samples) - self._num_own :]:
            if max(count, other) >= 2 * min(count, other):
                intercept = (other_us * count - us * other) / (count - other)
                found.append(min(max(0.0, intercept), us, other_us))
        return sorted(found)[(len(found) - 1) // 2] if len(found) > 1 else None


def _token_us(us: float, count: int, fixed_us: float) -> float:
    return max(us - fixed_us, 0.01 * us, 1.0) / count


T = TypeVar("T", _Times, _Prompts)


class _BySize(Generic[T]):
    """A quantity that depends on a size: samples by the size's bit length."""

    def __init__(self, kind: Callable[[T | None], T]) -> None:
        """`kind` makes samples that begin with others."""
        self._kind: Callable[[T | None], T] = kind
        self._recent: dict[int, T] = {}

    def observe(self, size: int, value: Any) -> None:
        if (bits := size.bit_length()) not in self._recent:
            self._recent[bits] = self._kind(self.near(size))
        self._recent[bits].observe(value)

    def near(self, size: int) -> T | None:
        """Return this size's samples, or the nearest size's if they are too few; None without any."""
        bits = size.bit_length()
        if (own := self._recent.get(bits)) is not None and own.is_known:
            return own
        known = (other for other, recent in self._recent.items() if recent.is_known)
        nearest = min(known, key=lambda other: abs(other - bits), default=None)
        return None if nearest is None else self._recent[nearest]


class StepPacing(Extra):
    """Learns how long steps take, and bounds their prompt tokens."""

    def __init__(self, max_itl_ms: float | None, clock: Callable[[], float]) -> None:
        """`max_itl_ms` is the target time for a step with prompts; None for a multiple of a decode step. `clock`
        returns seconds."""
        self._max_us = None if max_itl_ms is None else max_itl_ms * 1e3
        self._clock = clock
        self._decode_us = _BySize(_Times)  # a step's time, by its rows
        self._prompts = _BySize(_Prompts)  # keys: the _CONTEXT tokens before them
        self._fixed_us = _BySize(_Times)  # a step's time for any prompt tokens, by the same
        self._context = 0  # context of the last such token
        self._planned_at: dict[int, float] = {}  # plan times of steps in flight, by their ids
        self._result_at = 0.0

    def on_plan(self, step: Step) -> None:
        self._planned_at[step.step_id] = self._clock()

    def on_result(self, step: Step, result: StepResult) -> None:
        planned_at = self._planned_at.pop(step.step_id)
        if not step.rows:  # transfers alone
            self._result_at = self._clock()
            return
        self.observe_step(step.num_decoding, step.num_prompt_tokens, planned_at, step.prompt_context)

    def on_lost(self, in_flight: Set[RequestState]) -> Culprit | None:
        self._planned_at.clear()
        return None

    def max_prompt_tokens(self, running: Sequence[RequestState], waiting: WaitingQueue) -> int | None:
        missing = [state.num_total - state.num_computed for state in running]
        num_decoding = missing.count(1)
        context = next((state.num_computed for state, n in zip(running, missing, strict=True) if n > 1), 0)
        num_prompts, num_queued = len(missing) - num_decoding + len(waiting), sum(missing) - num_decoding
        return self.prompt_tokens_beside(num_decoding, num_prompts, num_queued + waiting.num_tokens, context)

    def planning_delay_s(self, step: Step) -> float:
        planned_at = self._planned_at[step.step_id]
        if not step.rows:
            return 0.0
        return self.delay_s(step.num_decoding, step.num_prompt_tokens, planned_at, step.prompt_context)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second; 0 before the first estimate."""
        prompts = self._prompts.near(self._context)
        return 0.0 if prompts is None else 1e6 / prompts.token_us(self._usual_fixed_us(self._context) or 0.0)[0]

    def _usual_fixed_us(self, key: int) -> float | None:
        """Return the fixed time for prompts, by its key; None while it is unknown."""
        fixed = self._fixed_us.near(key)
        return None if fixed is None else fixed.median

    def prompt_tokens_beside(
        self, num_decoding: int, num_prompts: int, num_queued: int, context: int = 0
    ) -> int | None:
        """Return the most prompt tokens that share a step with `num_decoding` rows; None for no limit.

        `num_queued` counts the tokens of `num_prompts` prompts that are not computed yet, and `context` the tokens
        before the next one. Without a target, a step takes a share of the queue if the decoding rows can wait so long.
        A burst of prompts then does not wait for the few that arrived first. Many rows wait less for few prompts."""
        if (prompts := self._prompts.near(context // _CONTEXT)) is None:
            return _FIRST_TOKENS if num_decoding else None
        decode, known_us = self._decode_us.near(num_decoding), self._usual_fixed_us(context // _CONTEXT)
        decode_us, fixed_us = 0.0 if decode is None else decode.median, known_us or 0.0
        token_us = prompts.token_us(fixed_us)[0]
        if not num_decoding:
            most_us = _ALONE_US
        elif self._max_us is not None:
            most_us = self._max_us - decode_us
        else:
            share_us = fixed_us + max(_AUTO_SHARE * num_queued, _LEAST_TOKENS) * token_us
            longest_us = max(_CALM_US - decode_us, _AUTO_US * min(1.0, num_prompts / num_decoding))
            most_us = max(_AUTO_STEPS * decode_us, min(share_us, longest_us))
        total = num_decoding + prompts.count_in(most_us, known_us)
        multiple = next(multiple for multiple, end in _MULTIPLES if total < end)
        total = (total + (multiple // 2 if multiple == _MULTIPLES[0][0] else 0)) // multiple * multiple
        least = _LEAST_TOKENS if _LEAST_TOKENS * token_us <= decode_us else _FIRST_TOKENS
        return max(least, total - num_decoding)

    def delay_s(self, num_decoding: int, num_prompt_tokens: int, planned_at: float, context: int = 0) -> float:
        """Return the seconds for which the step after the only one in flight need not be planned; 0 or less for now.

        A late plan leaves the device idle, so the least of recent times counts."""
        decode, prompts = self._decode_us.near(num_decoding), self._prompts.near(context // _CONTEXT)
        if decode is None or (num_prompt_tokens and prompts is None):
            return 0.0
        expected_us = decode.least
        if num_prompt_tokens and prompts is not None:
            fixed = self._fixed_us.near(context // _CONTEXT)
            least_us, usual_us = (0.0, 0.0) if fixed is None else (fixed.least, fixed.median)
            expected_us += least_us + num_prompt_tokens * prompts.token_us(usual_us)[1]
        began_at = max(planned_at, self._result_at)
        return began_at + (expected_us * (1.0 - _EARLY_SHARE) - _EARLY_US) / 1e6 - self._clock()

    def observe_step(self, num_decoding: int, num_prompt_tokens: int, planned_at: float, context: int = 0) -> None:
        """Learn from the time of the oldest step, which has returned its result."""
        now = self._clock()
        took_us, self._result_at = (now - max(planned_at, self._result_at)) * 1e6, now
        if not num_prompt_tokens:
            self._decode_us.observe(num_decoding, took_us)
            return
        decode = self._decode_us.near(num_decoding)
        decode_us = 0.0 if decode is None else decode.median
        # The time for fewer tokens shows where it dominates the step, and is better than none.
        is_long = num_prompt_tokens >= _LEAST_TOKENS or took_us > 2 * decode_us or self._prompts.near(0) is None
        if is_long and num_prompt_tokens >= _FIRST_TOKENS:
            self._context = context // _CONTEXT
            added_us, others = max(took_us - decode_us, 0.1 * took_us, 1.0), self._prompts.near(self._context)
            if others is not None and (fixed_us := others.fixed_us(num_prompt_tokens, added_us)) is not None:
                self._fixed_us.observe(self._context, fixed_us)
            self._prompts.observe(self._context, (num_prompt_tokens, added_us))
