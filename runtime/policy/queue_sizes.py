"""QueueSizes: what the waiting requests amount to, for the queue's limits and for routing."""

from __future__ import annotations

from collections import Counter

from runtime.base.types import TOKEN_BYTES, FinishReason
from runtime.core.extra import Extra
from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.request_state import RequestState
from runtime.core.stats import EngineStats

_SHARE = 3  # places that one owner may hold, for each free one


def exceeds_share(own: int, total: int, most: int) -> bool:
    """Return True if an owner with `own` places in a queue may not take another.

    It may hold _SHARE times the free places, so some are left for every other owner (dynamic thresholds, Choudhury and
    Hahne 1998)."""
    return own >= _SHARE * (most - total)


class QueueSizes(Extra):
    """Sums over the waiting requests."""

    def __init__(self) -> None:
        self.num_predicted = 0  # tokens in their predictions
        self.num_hits = 0  # tokens that were cached when they arrived; 0 unless the cache records its events
        self._num_list_bytes = self._num_grammar_bytes = 0
        self._grammars: Counter[str] = Counter()  # requests by grammar key
        self._hits: dict[RequestState, int] = {}  # live requests with cached tokens

    def attach(self, kv_cache: KVCacheManager, stats: EngineStats) -> None:
        self._kv_cache = kv_cache

    def on_add(self, state: RequestState) -> None:
        if self._kv_cache.cache.pending_events is not None and (hits := self._kv_cache.match_prefix(state)[0]):
            self._hits[state] = len(hits) * self._kv_cache.block_size

    def on_queue(self, state: RequestState) -> None:
        self._add(state, 1)

    def on_dequeue(self, state: RequestState) -> None:
        self._add(state, -1)

    def on_end(self, state: RequestState, reason: FinishReason) -> None:
        self._hits.pop(state, None)

    def num_bytes(self, num_tokens: int) -> int:
        """Return about how many bytes `num_tokens` waiting tokens and all else take in messages.

        Each grammar counts once."""
        return TOKEN_BYTES * num_tokens + self._num_list_bytes + self._num_grammar_bytes

    def has_grammar(self, key: str) -> bool:
        """Return True if a waiting request has this grammar."""
        return key in self._grammars

    def hits(self, state: RequestState) -> int:
        """Return the known tokens of a live request that were cached when it arrived."""
        return self._hits.get(state, 0)

    def _add(self, state: RequestState, sign: int) -> None:
        self.num_predicted += sign * len(state.request.prediction)
        self.num_hits += sign * self._hits.get(state, 0)
        self._num_list_bytes += sign * state.list_bytes
        if (grammar := state.params.grammar) is None:
            return
        count = self._grammars[grammar.key]
        if count == (sign < 0):  # the first with this grammar comes, or the last one goes
            self._num_grammar_bytes += sign * grammar.num_bytes
        self._grammars[grammar.key] += sign
        if not self._grammars[grammar.key]:
            del self._grammars[grammar.key]
