"""KV blocks: who holds which, which are free, which may be taken back from the prefix cache.

A block is in exactly one place:

    free list  --allocate-->  held (refs >= 1)  --release-->  free list            (never cached)
        ^                        ^        |
        |                     acquire  release                                     (cached)
        |                        |        v
        +------- evict -------  evictable, in the order of eviction_queue.py

Requests release their blocks last one first, and whoever holds a block holds its ancestors too. So a child always
becomes evictable before its parent, and leaves of the prefix tree are evicted first without looking at the tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from runtime.policy.branch_eviction import EvictionQueue

NULL_BLOCK = 0  # padding reads and writes land here; it is never allocated


class BlockPool:
    """Reference counts of `num_blocks` KV blocks, block 0 being the null block."""

    def __init__(self, num_blocks: int, on_evict: Callable[[list[int]], None]) -> None:
        """`on_evict(block_ids)` is called when the content of cached blocks is given up."""
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self.reset()

    def reset(self) -> None:
        """All blocks free, nothing cached."""
        self._refs = [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, NULL_BLOCK, -1))  # a stack: lowest id on top
        self._cached = bytearray(self.num_blocks)
        self._children: list[bytes] = [b""] * self.num_blocks  # of each block, the hash of its first cached child
        self._shared = bytearray(self.num_blocks)  # 1: prompts part behind this block, or behind one that follows it
        self._evictable = EvictionQueue()

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
        free, refs = self._free, self._refs
        blocks = free[: -count - 1 : -1]
        del free[len(free) - len(blocks) :]
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        for block in blocks:
            refs[block] = 1
        return blocks

    def acquire(self, blocks: list[int]) -> None:
        """One more holder for each of `blocks`, which are held or evictable."""
        refs = self._refs
        self._evictable.remove([block for block in blocks if refs[block] == 0])
        for block in blocks:
            refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One holder less for each of `blocks`, given in the order of their positions."""
        refs, cached, shared = self._refs, self._cached, self._shared
        others: list[int] = []
        shared_ones: list[int] = []
        is_shared = 0
        for block in reversed(blocks):
            refs[block] -= 1
            if is_shared:
                shared[block] = 1
            else:
                is_shared = shared[block]
            if refs[block] == 0:
                if not cached[block]:
                    self._free.append(block)
                elif is_shared:
                    shared_ones.append(block)
                else:
                    others.append(block)
        self._evictable.add(others, shared_ones)

    def mark_cached(self, block: int, block_hash: bytes, parent: int) -> None:
        """The held `block` now has a hash; when released it stays until evicted. Its `parent` is held, too, or it is
        the null block."""
        self._cached[block] = 1
        if not (first := self._children[parent]):
            self._children[parent] = block_hash
        elif first != block_hash:
            self._shared[parent] = 1

    def mark_spoilt(self, blocks: list[int]) -> None:
        """The held `blocks` lose their hashes: nobody acquires them any more, and when released they are free."""
        self._forget([block for block in blocks if self._cached[block]])

    def evict_unheld(self) -> None:
        """All evictable blocks become free."""
        self._free += self._evict(len(self._evictable))

    def _evict(self, count: int) -> list[int]:
        """The next blocks that go, which are cached no more."""
        blocks = self._evictable.take(count)
        self._forget(blocks)
        return blocks

    def _forget(self, blocks: list[int]) -> None:
        cached, shared, children = self._cached, self._shared, self._children
        for block in blocks:
            cached[block] = shared[block] = 0
            children[block] = b""
        self._on_evict(blocks)

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
