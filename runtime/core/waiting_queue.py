"""The requests that wait for a slot, in the order of service.

A heap of keys; the requests are found by their keys beside it. So one that leaves early is forgotten at once, and only
its key stays behind, until it comes to the top or such keys are the larger part of the heap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from heapq import heapify, heappop, heappush

from runtime.core.request_state import RequestState
from runtime.spec.types import TOKEN_BYTES


class WaitingQueue:
    """A priority queue from which any request can be taken; its length is the number of requests."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int, int]] = []  # a heap
        self._states: dict[tuple[int, int, int], RequestState] = {}
        self.num_tokens = 0  # that are known, of all that wait
        self.num_predicted = 0  # tokens of their predictions
        self.num_hits = 0  # of these, found in the prefix cache when they arrived
        self._list_bytes = self._grammar_bytes = 0
        self._grammars: Counter[str] = Counter()  # requests, by the key of their grammar

    def __len__(self) -> int:
        return len(self._states)

    @property
    def num_bytes(self) -> int:
        """Bytes that all of it takes in messages, about; each grammar counts once."""
        return TOKEN_BYTES * self.num_tokens + self._list_bytes + self._grammar_bytes

    def has_grammar(self, key: str) -> bool:
        """True if a waiting request has this grammar."""
        return key in self._grammars

    def push(self, state: RequestState) -> None:
        """Enter a request; its key is unlike all others."""
        self._states[state.sort_key] = state
        heappush(self._keys, state.sort_key)
        self.num_tokens += len(state.tokens)
        self.num_predicted += len(state.request.prediction)
        self.num_hits += state.num_hits
        self._list_bytes += state.list_bytes
        if (grammar := state.params.grammar) is not None:
            if grammar.key not in self._grammars:
                self._grammar_bytes += grammar.num_bytes
            self._grammars[grammar.key] += 1

    def first(self, but_not: Container[RequestState] = ()) -> RequestState | None:
        """The request to be served next, which stays; none of `but_not`."""
        if but_not:
            allowed = (state for state in self._states.values() if state not in but_not)
            return min(allowed, key=lambda state: state.sort_key, default=None)
        keys, states = self._keys, self._states
        while keys:
            if (state := states.get(keys[0])) is not None:
                return state
            heappop(keys)
        return None

    def find_faults(self, live: Mapping[str, RequestState], running: Sequence[RequestState]) -> list[str]:
        """One sentence for each waiting request that holds blocks, and for a wrong number of those that live."""
        holding = [state for state in live.values() if state.slot is None and state.num_blocks]
        faults = [f"Request {s.request.request_id!r} waits, but holds {s.num_blocks} blocks." for s in holding]
        if (num_live := len(running) + len(self)) != len(live):
            faults.append(f"{num_live} requests run or wait, but {len(live)} are live.")
        return faults

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands."""
        del self._states[state.sort_key]
        self.num_tokens -= len(state.tokens)
        self.num_predicted -= len(state.request.prediction)
        self.num_hits -= state.num_hits
        self._list_bytes -= state.list_bytes
        if (grammar := state.params.grammar) is not None:
            self._grammars[grammar.key] -= 1
            if not self._grammars[grammar.key]:
                del self._grammars[grammar.key]
                self._grammar_bytes -= grammar.num_bytes
        if len(self._keys) > 2 * len(self._states):
            self._keys = list(self._states)
            heapify(self._keys)
