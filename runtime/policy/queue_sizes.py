"""QueueSizes: what the waiting requests amount to, for the queue's limits and for routing."""

from __future__ import annotations

from collections import Counter

from runtime.base.types import TOKEN_BYTES, FinishReason, Request
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


class KeyedBytes:
    """Bytes of the grammars and images in some requests, each counted once."""

    def __init__(self) -> None:
        self.total = 0
        self._counts: Counter[str] = Counter()  # requests by key

    def add(self, request: Request, sign: int) -> None:
        """Count a request, or with -1 one that leaves."""
        for key, value in request.keyed.items():
            count = self._counts.pop(key, 0) + sign
            if count == (sign > 0):  # the first request with it comes, or the last one goes
                self.total += sign * value.num_bytes
            if count:
                self._counts[key] = count

    def added_by(self, request: Request) -> int:
        """Return the bytes that a further request adds, its own included."""
        return request.own_bytes + sum(v.num_bytes for key, v in request.keyed.items() if key not in self._counts)


class RequestSizes:
    """Sums over some requests. `keyed` may count others, too."""

    def __init__(self, keyed: KeyedBytes) -> None:
        self.num_tokens = self.own_bytes = 0  # as a request's
        self.keyed = keyed

    def add(self, request: Request, sign: int) -> None:
        """Count a request, or with -1 one that leaves."""
        self.num_tokens += sign * request.num_tokens
        self.own_bytes += sign * request.own_bytes
        self.keyed.add(request, sign)


class QueueSizes(Extra):
    """Sums over the waiting requests."""

    def __init__(self) -> None:
        self.num_predicted = 0  # tokens in their predictions
        self.num_hits = 0  # tokens that were cached when they arrived; 0 unless the cache records its events
        self._num_list_bytes = 0
        self.keyed = KeyedBytes()
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

        Each grammar and image counts once."""
        return TOKEN_BYTES * num_tokens + self._num_list_bytes + self.keyed.total

    def hits(self, state: RequestState) -> int:
        """Return the known tokens of a live request that were cached when it arrived."""
        return self._hits.get(state, 0)

    def _add(self, state: RequestState, sign: int) -> None:
        self.num_predicted += sign * len(state.request.prediction)
        self.num_hits += sign * self._hits.get(state, 0)
        self._num_list_bytes += sign * state.list_bytes
        self.keyed.add(state.request, sign)
