"""Which waiting request may be admitted: one whose prompt fits, and with it what all running ones will probably need.

A request that is admitted too early costs a preemption, and the work to compute it again; one that is admitted too late
leaves memory unused. So a request counts with the blocks that it is expected to hold in the end, by its limit if it
ignores EOS, else by what is known of answers like it (output_length.py). It is looked at again as its output grows.

Many answers make up for one another, a few may all be long: the one to be admitted must fit with half as much again. In
a large cache that is little, and where three long answers fill it, it halves the preemptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.request_state import NEVER, RequestState
from runtime.policy.output_length import OutputLengthEstimator

_MARGIN = 0.5  # of what a waiting request is expected to need


class Admission:
    """Works on `RequestState.expected_blocks`; what ends tells it how long answers get."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache, self.lengths = kv_cache, OutputLengthEstimator()

    def allows(self, state: RequestState, hits: Sequence[int], running: Sequence[RequestState]) -> bool:
        """True if a waiting request that finds the blocks `hits` in the cache fits beside those that run; alone, its
        known tokens have to."""
        pool = self._kv_cache.pool
        room = pool.num_available - pool.num_unheld(hits) + len(hits)
        if not running:
            return self._kv_cache.most_blocks_for(len(state.tokens)) <= room
        self._expect(state)
        needed = state.expected_blocks
        if not state.params.ignore_eos:
            needed += int(_MARGIN * (needed - self._kv_cache.most_blocks_for(len(state.tokens))))
        room -= min(needed, self._kv_cache.most_blocks_for(state.max_len))
        for other in running:
            if other.num_total >= other.revise_at:
                self._expect(other)
            missing = other.expected_blocks - other.num_blocks
            if missing > 0:
                room -= missing
        return room >= 0

    def note_end(self, state: RequestState, stopped: bool) -> None:
        """A request ends; its output had come to an end by itself, or not."""
        if not state.params.ignore_eos and (length := self._observe(state)) > 0:
            self.lengths.observe_end(state.params.max_tokens, length, stopped)

    def _expect(self, state: RequestState) -> None:
        params, length, revise_at = state.params, state.max_len, NEVER
        if not params.ignore_eos:
            reached = max(self._observe(state), params.min_tokens)
            more, revise_at = self.lengths.expect(params.max_tokens, reached)
            length = min(length, max(state.prompt_len + reached + ceil(more), state.num_total + 1))
            revise_at += state.prompt_len + 1
        state.expected_blocks, state.revise_at = self._kv_cache.most_blocks_for(length), revise_at

    def _observe(self, state: RequestState) -> int:
        """Tell the estimate how far the output has come; returns its length."""
        length = len(state.tokens) - state.prompt_len
        self.lengths.observe(state.params.max_tokens, state.num_observed, length)
        state.num_observed = max(state.num_observed, length)
        return length
