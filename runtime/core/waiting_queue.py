"""The requests that wait for a slot, in the order of service.

A heap of keys; the requests are found by their keys beside it. So one that leaves early is forgotten at once, and only
its key stays behind, until it comes to the top or such keys are the larger part of the heap.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from runtime.core.request_state import RequestState


class WaitingQueue:
    """A priority queue from which any request can be taken; its length is the number of requests."""

    def __init__(self) -> None:
        self._keys: list[tuple[int, int, int]] = []  # a heap
        self._states: dict[tuple[int, int, int], RequestState] = {}
        self.num_tokens = 0  # that are known, of all that wait
        self.num_predicted = 0  # tokens of their predictions
        self.num_hits = 0  # of these, found in the prefix cache when they arrived

    def __len__(self) -> int:
        return len(self._states)

    def push(self, state: RequestState) -> None:
        """Enter a request; its key is unlike all others."""
        self._states[state.sort_key] = state
        heappush(self._keys, state.sort_key)
        self.num_tokens += len(state.tokens)
        self.num_predicted += len(state.request.prediction)
        self.num_hits += state.num_hits

    def first(self) -> RequestState | None:
        """The request to be served next, which stays."""
        keys, states = self._keys, self._states
        while keys:
            if (state := states.get(keys[0])) is not None:
                return state
            heappop(keys)
        return None

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands."""
        del self._states[state.sort_key]
        self.num_tokens -= len(state.tokens)
        self.num_predicted -= len(state.request.prediction)
        self.num_hits -= state.num_hits
        if len(self._keys) > 2 * len(self._states):
            self._keys = list(self._states)
            heapify(self._keys)
