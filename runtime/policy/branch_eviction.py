"""BranchEviction: shared prefixes remain in the cache longer than one conversation's history.

The least recently released block is evicted first, but a branch block ages at a quarter of the speed. Cached prompts
diverge at a branch block or below it. An instruction that begins many conversations is worth more than one
conversation's history, which may be over. (Segmented LRU, Karedla, Love and Wherry 1994, protects blocks requested
twice. Here these would be every history of three turns.)

Children are released before their parents. So each queue's head is a leaf in the prefix tree of the queue's
blocks. A branch block is evicted only if it is older than the other queue's head, so none of those is its
child."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from runtime.core.block_pool import CachedBlock, EvictionOrder
from runtime.core.extra import Extra

BRANCH_AGE_DIVISOR = 4


class BranchOrder(EvictionOrder):
    """Two queues of blocks by release time; the clock counts released blocks."""

    def reset(self, num_blocks: int) -> None:
        self._others: OrderedDict[int, int] = OrderedDict()  # block -> release time
        self._branches: OrderedDict[int, int] = OrderedDict()
        self._now = 0
        self._first_child = [b""] * num_blocks  # hash of each block's first cached child
        self._has_branch = bytearray(num_blocks)  # 1 if two cached prompts diverge at or below the block

    def __len__(self) -> int:
        return len(self._others) + len(self._branches)

    def __contains__(self, block: int) -> bool:
        return block in self._others or block in self._branches

    def __iter__(self) -> Iterator[int]:
        yield from self._others
        yield from self._branches

    def on_cached(self, cached: list[CachedBlock]) -> None:
        first_child = self._first_child
        for _, block_hash, parent in cached:
            if not (first := first_child[parent]):
                first_child[parent] = block_hash
            elif first != block_hash:
                self._has_branch[parent] = 1

    def on_uncached(self, blocks: list[int]) -> None:
        first_child, has_branch = self._first_child, self._has_branch
        for block in blocks:
            first_child[block] = b""
            has_branch[block] = 0

    def add(self, blocks: list[int], table: list[int]) -> None:
        has_branch = self._has_branch
        if not (branches := [block for block in table if has_branch[block]]):
            self._append(blocks, [])
            return
        for block in table[: table.index(branches[-1])]:  # a branch block's parent is one, too
            has_branch[block] = 1
        self._append([b for b in blocks if not has_branch[b]], [b for b in blocks if has_branch[b]])

    def _append(self, others: list[int], branches: list[int]) -> None:
        """Add released blocks, children before parents. No block in `others` is a branch block's parent."""
        now = self._now
        for queue, blocks in ((self._others, others), (self._branches, branches)):
            for block in blocks:
                now += 1
                queue[block] = now
        self._now = now

    def remove(self, blocks: list[int]) -> None:
        others, branches = self._others, self._branches
        for block in blocks:
            del (others if block in others else branches)[block]

    def take(self, count: int) -> list[int]:
        if not self._branches:
            return [self._others.popitem(last=False)[0] for _ in range(count)]
        return [self._next_queue().popitem(last=False)[0] for _ in range(count)]

    def _next_queue(self) -> OrderedDict[int, int]:
        others, branches, now = self._others, self._branches, self._now
        if not branches:
            return others
        if not others:
            return branches
        branch_age, other_age = now - next(iter(branches.values())), now - next(iter(others.values()))
        return others if branch_age <= BRANCH_AGE_DIVISOR * other_age else branches


class BranchEviction(Extra):
    """Hands the order to the pool."""

    def eviction_order(self) -> EvictionOrder:
        return BranchOrder()
