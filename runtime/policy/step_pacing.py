"""Paces steps: how many prompt tokens one takes beside rows that decode, and how late the next one may be planned.

The expected time of a step is the time of a step that decodes the same rows, plus a constant for each prompt token.
Both are estimated from recent steps, so that they follow the model, the device and the length of contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from runtime.core.extra import Culprit, Ended, Extra
from runtime.core.plan import StepResult
from runtime.core.request_state import RequestState
from runtime.core.step import Step
from runtime.spec.types import StepOutput

# Without a target, the larger of two counts: prompt tokens for this many decode steps' time, or this share of all that
# wait.
_AUTO_STEPS, _AUTO_SHARE = 4.0, 0.35
_LEAST_TOKENS = 64  # a step with prompts takes at least this many prompt tokens

# (multiple, upper limit of the tokens of a step). Steps of such multiples, decoding rows included, fill a runner's
# graphs.
_MULTIPLES = (64, 512), (128, 2048), (2048, 1 << 62)
_EARLY_US, _EARLY_SHARE = 500.0, 0.1  # the next step is planned this long before a step's expected end


class _Estimate:
    """The mean of a varying quantity, and a low value that it seldom falls below."""

    _WEIGHT, _LOW_WEIGHT = 0.2, 0.02  # of the newest value
    _MOST_SURPRISE = 2.0  # largest ratio to the mean; a larger one comes from a compiler or a pause of the host

    def __init__(self, first: float) -> None:
        self.mean = self.low = first

    def observe(self, value: float) -> None:
        value = min(max(value, self.mean / self._MOST_SURPRISE), self.mean * self._MOST_SURPRISE)
        self.mean += self._WEIGHT * (value - self.mean)
        self.low = value if value < self.low else self.low + self._LOW_WEIGHT * (value - self.low)


class StepPacing(Extra):
    """Learns how long steps take, and bounds their prompt tokens."""

    def __init__(self, max_itl_ms: float | None, clock: Callable[[], float]) -> None:
        """`max_itl_ms` is the target time of a step with prompts; None for a multiple of a decode step. `clock` returns
        seconds."""
        self._max_us = None if max_itl_ms is None else max_itl_ms * 1e3
        self._clock = clock
        self._decode_us: dict[int, _Estimate] = {}  # of a step, by the number of bits of its number of rows
        self._token_us: _Estimate | None = None  # of a prompt token
        self._planned_at: dict[int, float] = {}  # of the steps in flight, by their ids
        self._result_at = 0.0

    def on_plan(self, step: Step) -> None:
        self._planned_at[step.step_id] = self._clock()

    def on_result(self, step: Step, result: StepResult, output: StepOutput) -> Ended:
        self.observe_step(step.num_decoding, step.num_prompt_tokens, self._planned_at.pop(step.step_id))
        return []

    def on_lost(self, in_flight: Set[RequestState]) -> Culprit | None:
        self._planned_at.clear()
        return None

    def max_prompt_tokens(self, running: Sequence[RequestState], num_waiting_tokens: int) -> int | None:
        missing = [state.num_total - state.num_computed for state in running]
        num_decoding = missing.count(1)
        return self.prompt_tokens_beside(num_decoding, num_waiting_tokens + sum(missing) - num_decoding)

    def planning_delay_s(self, step: Step) -> float:
        return self.delay_s(step.num_decoding, step.num_prompt_tokens, self._planned_at[step.step_id])

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second; 0 before the first estimate."""
        return 0.0 if self._token_us is None else 1e6 / self._token_us.mean

    def prompt_tokens_beside(self, num_decoding: int, num_queued: int) -> int | None:
        """Return the most prompt tokens of a step beside `num_decoding` rows; None for no limit.

        `num_queued` counts all prompt tokens that are not computed yet. Without a target, a step takes at least a share
        of them. A burst of prompts then does not wait for the few that arrived first."""
        if not num_decoding or self._token_us is None or (decode := self._decode(num_decoding)) is None:
            return None
        token_us = self._token_us.mean
        if self._max_us is None:
            count = max(_AUTO_STEPS * decode.mean / token_us, _AUTO_SHARE * num_queued)
        else:
            count = (self._max_us - decode.mean) / token_us
        total = num_decoding + int(count)
        total -= total % next(multiple for multiple, end in _MULTIPLES if total < end)
        return max(_LEAST_TOKENS, total - num_decoding)

    def delay_s(self, num_decoding: int, num_prompt_tokens: int, planned_at: float) -> float:
        """Return the seconds for which the step after the only one in flight need not be planned; 0 or less for now.

        A late plan leaves the device idle, so the low estimate of a step's time counts."""
        if (decode := self._decode(num_decoding)) is None or (num_prompt_tokens and self._token_us is None):
            return 0.0
        expected_us = decode.low + (num_prompt_tokens * self._token_us.low if self._token_us else 0.0)
        began_at = max(planned_at, self._result_at)
        return began_at + (expected_us * (1.0 - _EARLY_SHARE) - _EARLY_US) / 1e6 - self._clock()

    def observe_step(self, num_decoding: int, num_prompt_tokens: int, planned_at: float) -> None:
        """Learn from the time of the oldest step, which has returned its result."""
        now = self._clock()
        took_us, self._result_at = (now - max(planned_at, self._result_at)) * 1e6, now
        if not num_prompt_tokens:
            size = num_decoding.bit_length()
            if (known := self._decode_us.get(size)) is None:
                self._decode_us[size] = _Estimate(took_us)
            else:
                known.observe(took_us)
        elif num_prompt_tokens >= _LEAST_TOKENS and (decode := self._decode(num_decoding)) is not None:
            token_us = max(took_us - decode.mean, 0.1 * took_us) / num_prompt_tokens
            if self._token_us is None:
                self._token_us = _Estimate(token_us)
            else:
                self._token_us.observe(token_us)

    def _decode(self, num_decoding: int) -> _Estimate | None:
        """Return the estimate of a step that decodes this many rows, or of the nearest size observed."""
        if not (known := self._decode_us):
            return None
        size = num_decoding.bit_length()
        return known[size] if size in known else known[min(known, key=lambda other: abs(other - size))]
