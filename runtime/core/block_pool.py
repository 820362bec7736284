"""KV blocks: who holds which, which are free, which may be taken back from the prefix cache.

A block is in exactly one place:

    free list  --allocate-->  held (refs >= 1)  --release-->  free list            (never cached)
        ^                        ^        |
        |                     acquire  release                                     (cached)
        |                        |        v
        +------- evict -------  evictable, least recently released first

Requests release their blocks last one first, and whoever holds a block holds its ancestors too. So in the evictable
queue a child always stands before its parent: its head is always a leaf of the prefix tree, and taking blocks from the
head is LRU eviction of leaves without looking at the tree.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping

NULL_BLOCK = 0  # padding reads and writes land here; it is never allocated


class BlockPool:
    """Reference counts of `num_blocks` KV blocks, block 0 being the null block."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        """`on_evict(block_id)` is called when a cached block's content is given up."""
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self.reset()

    def reset(self) -> None:
        """All blocks free, nothing cached."""
        self._refs = [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, NULL_BLOCK, -1))  # a stack: lowest id on top
        self._cached = bytearray(self.num_blocks)
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free ones and evictable ones."""
        return len(self._free) + len(self._evictable)

    def is_cached(self, block: int) -> bool:
        """True if a prefix can be found that ends in `block`."""
        return bool(self._cached[block])

    def refs(self, block: int) -> int:
        """The number of requests that hold `block`."""
        return self._refs[block]

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of these blocks no request holds."""
        refs = self._refs
        return sum([refs[block] == 0 for block in blocks])

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, held once each; the caller has checked `num_available`."""
        free, blocks = self._free, []
        for _ in range(count):
            block = free.pop() if free else self._evict_next()
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: list[int]) -> None:
        """One more holder for each of `blocks`, which are held or evictable."""
        refs = self._refs
        for block in blocks:
            if refs[block] == 0:
                del self._evictable[block]
            refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One holder less for each of `blocks`, given in the order of their positions."""
        refs, cached = self._refs, self._cached
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block] == 0:
                if cached[block]:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def mark_cached(self, block: int) -> None:
        """The held `block` now has a hash; when released it stays until evicted."""
        self._cached[block] = 1

    def mark_spoilt(self, blocks: list[int]) -> None:
        """The held `blocks` lose their hashes: nobody acquires them any more, and when released they are free."""
        for block in blocks:
            if self._cached[block]:
                self._cached[block] = 0
                self._on_evict(block)

    def evict_unheld(self) -> None:
        """All evictable blocks become free."""
        while self._evictable:
            self._free.append(self._evict_next())

    def _evict_next(self) -> int:
        """The block that was released least recently, which is cached no more."""
        block, _ = self._evictable.popitem(last=False)
        self._cached[block] = 0
        self._on_evict(block)
        return block

    def find_faults(self, held: Mapping[int, int]) -> list[str]:
        """One sentence for each block that is not free, evictable or held as often as `held` says, in one place."""
        places = Counter([*self._free, *self._evictable, *held])
        faults = []
        for block in range(NULL_BLOCK + 1, self.num_blocks):
            refs, wanted, is_idle = self._refs[block], held.get(block, 0), block in self._evictable
            if refs != wanted:
                faults.append(f"Block {block} counts {refs} holders, but {wanted} requests hold it.")
            if places[block] != 1 or (is_idle and not self._cached[block]):
                faults.append(f"Block {block} is free, evictable or held in {places[block]} places.")
        if self._cached[NULL_BLOCK] or places[NULL_BLOCK]:
            faults.append("The null block is cached, free or held.")
        return faults
