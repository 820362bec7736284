"""The order in which cached KV blocks that no request holds are given up.

The block that was released least recently goes first, but one behind which cached prompts part, or an ancestor of one,
stays SHARED_STAY times as long as others: an instruction with which many conversations begin is worth more than the
history of one, which may be over. (Segmented LRU, Karedla, Love and Wherry 1994, protects what was asked for twice;
here that would be every history of three turns.)

Children are released before their parents. So the head of each of the two queues is a leaf of the prefix tree among
the blocks of that queue, and as a shared block goes only if it has waited longer than the head of the others, none of
them is its child.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

SHARED_STAY = 4


class EvictionQueue:
    """Blocks by the time since which nobody holds them; its clock counts the blocks that came."""

    def __init__(self) -> None:
        self._others: OrderedDict[int, int] = OrderedDict()  # block -> when it came
        self._shared: OrderedDict[int, int] = OrderedDict()
        self._now = 0

    def __len__(self) -> int:
        return len(self._others) + len(self._shared)

    def __contains__(self, block: int) -> bool:
        return block in self._others or block in self._shared

    def __iter__(self) -> Iterator[int]:
        yield from self._others
        yield from self._shared

    def add(self, others: list[int], shared: list[int]) -> None:
        """Blocks that nobody holds any more, children before their parents; no block of `others` is the parent of one
        of `shared`."""
        now = self._now
        for queue, blocks in ((self._others, others), (self._shared, shared)):
            for block in blocks:
                now += 1
                queue[block] = now
        self._now = now

    def remove(self, blocks: list[int]) -> None:
        """Somebody holds these again."""
        others, shared = self._others, self._shared
        for block in blocks:
            del (others if block in others else shared)[block]

    def take(self, count: int) -> list[int]:
        """The next `count` blocks that go; there must be as many."""
        return [self._next_queue().popitem(last=False)[0] for _ in range(count)]

    def _next_queue(self) -> OrderedDict[int, int]:
        others, shared, now = self._others, self._shared, self._now
        if not shared:
            return others
        if others and now - next(iter(shared.values())) <= SHARED_STAY * (now - next(iter(others.values()))):
            return others
        return shared
