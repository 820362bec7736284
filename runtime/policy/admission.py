"""Admission: a waiting request starts if its prompt fits next to what all running requests will probably need.

A request that starts too early costs a preemption and its work again; one that starts too late leaves memory unused. So
a request counts with the blocks that it is expected to hold when it ends. If it ignores EOS that is its limit, else an
estimate from answers like it (output_length.py), which is revised as its output grows.

Many answers make up for one another; a few may all be long. So the new request must fit with half as much again. In a
large cache that is little. Where three long answers fill the cache, it halves the preemptions."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from runtime.base.types import FinishReason
from runtime.core.extra import Extra
from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.request_state import NEVER, RequestState
from runtime.core.stats import EngineStats
from runtime.policy.output_length import OutputLengthEstimator

_MARGIN = 0.5  # extra share of a waiting request's expected need


class _Expectation:
    """One request's expected end."""

    __slots__ = ("num_blocks", "num_observed", "revise_at")

    def __init__(self, num_observed: int) -> None:
        self.num_blocks = 0  # that it holds at its end
        self.revise_at = 0  # num_total at which the estimate changes
        self.num_observed = num_observed  # output tokens that the estimator has seen


class Admission(Extra):
    """Compares free blocks with the expected need. Requests that end teach it how long answers get."""

    def __init__(self) -> None:
        self.lengths = OutputLengthEstimator()
        self._expected: dict[RequestState, _Expectation] = {}

    def attach(self, kv_cache: KVCacheManager, stats: EngineStats) -> None:
        self._kv_cache = kv_cache

    def on_add(self, state: RequestState) -> None:
        # Output from another engine, or before it may stop, teaches nothing.
        self._expected[state] = _Expectation(max(len(state.tokens) - state.prompt_len, state.params.min_tokens))

    def may_admit(self, state: RequestState, room: int, running: Sequence[RequestState]) -> bool:
        if not running:
            return True
        most_blocks_for, expected = self._kv_cache.most_blocks_for, self._expected
        needed = self._expect(state).num_blocks
        if not state.params.ignore_eos:
            needed += int(_MARGIN * (needed - most_blocks_for(len(state.tokens))))
        room -= min(needed, most_blocks_for(state.max_len))
        for other in running:
            known = expected[other]
            if other.num_total >= known.revise_at:
                known = self._expect(other)
            missing = known.num_blocks - other.num_blocks
            if missing > 0:
                room -= missing
        return room >= 0

    def on_end(self, state: RequestState, reason: FinishReason) -> None:
        known = self._expected.pop(state)
        if not state.params.ignore_eos and (length := self._observe(state, known)) > 0:
            self.lengths.observe_end(state.params.max_tokens, length, reason is FinishReason.STOP)

    def _expect(self, state: RequestState) -> _Expectation:
        """Revise a request's expectation."""
        known, params = self._expected[state], state.params
        length, known.revise_at = state.max_len, NEVER
        if not params.ignore_eos:
            reached = max(self._observe(state, known), params.min_tokens)
            more, revise_at = self.lengths.expect(params.max_tokens, reached)
            length = min(length, max(state.prompt_len + reached + ceil(more), state.num_total + 1))
            known.revise_at = revise_at + state.prompt_len + 1
        known.num_blocks = self._kv_cache.most_blocks_for(length)
        return known

    def _observe(self, state: RequestState, known: _Expectation) -> int:
        """Report new output to the estimator; return the output's length."""
        length = len(state.tokens) - state.prompt_len
        self.lengths.observe(state.params.max_tokens, known.num_observed, length)
        known.num_observed = max(known.num_observed, length)
        return length
