"""Caches that know the future: they first evict the block that is needed last (Belady's rule). No real cache can.

The simulation knows the starts of all conversations to come. For a conversation with a finished answer it knows when
the next turn starts, if there is one. So for every block the time of its next use is known, though not the engine.
Everything else equals a real engine: room, blocks, work, and the router in the fronts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from heapq import heappop, heappush, nsmallest
from math import inf

from benchmarks.simulate.engine import SimulatedEngine
from benchmarks.simulate.traces import Conversation, Job
from runtime.policy.branch_eviction import BranchOrder

_MANY = 512  # blocks that are sorted at once


class _WantedLast(BranchOrder):
    """The block with the latest `next_use` goes first. Of equal ones the one that was released first goes first, so
    that children go before their parents."""

    def __init__(self, next_use: Callable[[int], float]) -> None:
        self._next_use = next_use
        # Negative next use time, release time, block; the last entry is evicted next.
        self._going: list[tuple[float, int, int]] = []

    def add(self, blocks: list[int], table: list[int]) -> None:
        self._append(blocks, [])

    def take(self, count: int) -> list[int]:
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        while True:
            if not self._going:
                entries = ((-self._next_use(block), at, block) for block, at in self._others.items())
                self._going = nsmallest(_MANY, entries)[::-1]
            _, at, block = self._going.pop()
            if self._others.get(block) == at:
                del self._others[block]
                return block


class Foresight:
    """When blocks are used next. `clock` is the simulation's."""

    def __init__(self, conversations: Iterable[Conversation], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._users: dict[bytes, int | Conversation] = {}  # a block's user: a shared part's key, or a conversation
        self._starts: dict[int, list[float]] = {}  # starts of conversations that begin with a shared part
        self._turns: dict[int, list[float]] = {}  # heaps: the times at which these go on
        self._next: dict[int, float] = {}  # the time at which a conversation goes on, by its identity
        for conversation in conversations:
            if (key := conversation.shared_key) is not None:
                self._starts.setdefault(key, []).append(conversation.start)

    def give(self, engine: SimulatedEngine) -> None:
        """Install it in the engine's cache, which must be empty."""
        kv_cache = engine.scheduler.kv_cache
        hash_of = kv_cache.cache._hash_of
        kv_cache.pool._evictable = _WantedLast(lambda block: self._next_use(self._users.get(hash_of[block])))
        kv_cache.pool._evictable.reset(kv_cache.pool.num_blocks)

    def answered(self, job: Job, block_hashes: list[bytes], num_shared: int, next_at: float | None) -> None:
        """A job's answer is there; its first `num_shared` blocks are shared. `next_at` is the time at which its
        conversation goes on."""
        conversation, key = job.conversation, job.conversation.shared_key
        self._users.update(dict.fromkeys(block_hashes[num_shared:], conversation))
        self._next[id(conversation)] = inf if next_at is None else next_at
        if key is not None:
            self._users.update(dict.fromkeys(block_hashes[:num_shared], key))
            if next_at is not None:
                heappush(self._turns.setdefault(key, []), next_at)

    def _next_use(self, user: int | Conversation | None) -> float:
        """When a request will use a block with this user. Now, if the user is None: the block is in use, or was a
        moment ago."""
        now = self._clock()
        if user is None:
            return now
        if isinstance(user, Conversation):
            return self._next[id(user)]
        starts, turns = self._starts.get(user, []), self._turns.get(user, [])
        while turns and turns[0] < now:
            heappop(turns)
        at = bisect_right(starts, now)
        return min(starts[at] if at < len(starts) else inf, turns[0] if turns else inf)
