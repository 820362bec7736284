"""Where requests stand: the queue of waiting requests, and the running ones' slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice

from runtime.core.request_state import RequestState, SortKey

_MOST_SEEN = 64  # waiting requests among which a step looks for a short prompt


class WaitingQueue:
    """Requests without a slot, in the order of service.

    A heap holds their keys, and a dict finds a request by its key. A request that leaves early only leaves its key
    behind. The key goes when it reaches the top, or when such keys outnumber the requests.
    """

    def __init__(self) -> None:
        self._keys: list[SortKey] = []  # a heap
        self._states: dict[SortKey, RequestState] = {}
        self.num_tokens = 0  # known tokens in all waiting requests

    def __len__(self) -> int:
        return len(self._states)

    def push(self, state: RequestState) -> None:
        """Add a request; its key differs from all others."""
        self._states[state.sort_key] = state
        heappush(self._keys, state.sort_key)
        self.num_tokens += len(state.tokens)

    def first(self, excluded: Container[RequestState] = ()) -> RequestState | None:
        """Return the next request in the order of service, skipping `excluded`. It stays in the queue."""
        if excluded:
            allowed = (state for state in self._states.values() if state not in excluded)
            return min(allowed, key=lambda state: state.sort_key, default=None)
        keys, states = self._keys, self._states
        while keys:
            if (state := states.get(keys[0])) is not None:
                return state
            heappop(keys)
        return None

    def oldest(self) -> Iterable[RequestState]:
        """Return the requests that were queued first, a limited number."""
        return islice(self._states.values(), _MOST_SEEN)

    def remove(self, state: RequestState) -> None:
        """Take a request out, wherever it stands."""
        del self._states[state.sort_key]
        self.num_tokens -= len(state.tokens)
        if len(self._keys) > 2 * len(self._states):
            self._keys = list(self._states)
            heapify(self._keys)

    def find_faults(self, live: Mapping[str, RequestState], running: Sequence[RequestState]) -> list[str]:
        """Return one sentence for each waiting request that holds blocks, and for a wrong number of requests."""
        holding = [state for state in live.values() if state.slot is None and state.num_blocks]
        faults = [f"Request {s.request.request_id!r} waits, but holds {s.num_blocks} blocks." for s in holding]
        if (num_live := len(running) + len(self)) != len(live):
            faults.append(f"{num_live} requests run or wait, but {len(live)} are live.")
        return faults


def shortest_prompt(
    states: Iterable[RequestState], priority: int, limit: int, excluded: Container[RequestState]
) -> RequestState | None:
    """Return the request of this priority or a higher one that has the fewest tokens to compute, below `limit`; None if
    all have more."""
    best = None
    for state in states:
        missing = state.num_total - state.num_computed
        is_prompt = state.slot is None or (missing > 1 and state.num_total < state.plan_limit)
        if is_prompt and missing < limit and state.sort_key[0] <= priority and state not in excluded:
            best, limit = state, missing
    return best


class SlotPool:
    """Slots: the places of a batch, one for each running request."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self.reset()

    def __len__(self) -> int:
        return len(self._free)

    def reset(self) -> None:
        """Free all slots; fresh runners hold none."""
        self._free = list(range(self._num_slots - 1, -1, -1))  # a stack: lowest number on top
        self._released: list[int] = []

    def acquire(self) -> int:
        """Take a free slot; there must be one."""
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Return a slot. Another request may take it at once, because runners execute plans in order (C2)."""
        self._free.append(slot)
        self._released.append(slot)

    def take_released(self) -> list[int]:
        """Return the slots that were released since the last call."""
        released, self._released = self._released, []
        return released

    def find_faults(self, held: Iterable[int | None]) -> list[str]:
        """Return one sentence for each slot that is not either free or held once."""
        places = Counter([*self._free, *held])
        slots = range(self._num_slots)
        faults = [f"Slot {slot} is free or held {places[slot]} times." for slot in slots if places[slot] != 1]
        return faults + [f"Slot {slot} is held, but does not exist." for slot in places if slot not in slots]
