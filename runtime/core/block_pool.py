"""KV blocks: which are held, which are free, and which the prefix cache may give up.

A block is in exactly one place:

    free list  --allocate-->  held (refs >= 1)  --release-->  free list            (never cached)
        ^                        ^        |
        |                     acquire  release                                     (cached)
        |                        |        v
        +------- evict -------  spent, or evictable in an EvictionOrder

Spent blocks are evicted first: ones below a window, which a later prompt needs only if it branches off there. A request
releases its last block first, and holds all ancestors of its blocks without a window. So a child always becomes
evictable before its parent, and the prefix tree's leaves are evicted first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

CachedBlock = tuple[int, bytes, int]  # a block, its hash and its parent, which may be the null block
NULL_BLOCK = 0  # padding reads and writes land here; it is never allocated


class EvictionOrder:
    """Evictable blocks, the least recently released first."""

    def reset(self, num_blocks: int) -> None:
        """Forget all of the pool's `num_blocks` blocks."""
        self._blocks: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def add(self, blocks: list[int], table: list[int]) -> None:
        """Add `blocks`, children before parents. They were in the released `table`, which is in order of positions."""
        self._blocks.update(dict.fromkeys(blocks))

    def remove(self, blocks: list[int]) -> None:
        """A request holds these blocks again."""
        for block in blocks:
            del self._blocks[block]

    def take(self, count: int) -> list[int]:
        """Remove and return the next `count` blocks; there must be as many."""
        blocks = list(islice(self._blocks, count))
        self.remove(blocks)
        return blocks

    def on_cached(self, cached: list[CachedBlock]) -> None:
        """These blocks have entered the cache, parents first."""

    def on_uncached(self, blocks: list[int]) -> None:
        """These blocks have left the cache."""


class BlockPool:
    """Reference counts of `num_blocks` KV blocks; block 0 is the null block."""

    def __init__(
        self, num_blocks: int, on_evict: Callable[[list[int]], None], order: EvictionOrder | None = None
    ) -> None:
        """`on_evict(blocks)` is called before the content of cached blocks is overwritten."""
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._evictable = EvictionOrder() if order is None else order
        self.reset()

    def reset(self) -> None:
        """Free all blocks and empty the cache."""
        self._refs = [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, NULL_BLOCK, -1))  # a stack: lowest id on top
        self._cached = bytearray(self.num_blocks)
        self._spent: dict[int, None] = {}  # evicted before the order's blocks
        self._evictable.reset(self.num_blocks)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can return: free, spent and evictable ones."""
        return len(self._free) + len(self._spent) + len(self._evictable)

    def is_cached(self, block: int) -> bool:
        """True if a prefix can be found that ends in `block`."""
        return bool(self._cached[block])

    def refs(self, block: int) -> int:
        """The number of requests that hold `block`."""
        return self._refs[block]

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks no request holds."""
        refs = self._refs
        return sum([refs[block] == 0 for block in blocks])

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks, held once each; at least as many must be available."""
        free, refs = self._free, self._refs
        blocks = free[: -count - 1 : -1]
        del free[len(free) - len(blocks) :]
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        for block in blocks:
            refs[block] = 1
        return blocks

    def acquire(self, blocks: list[int]) -> None:
        """Add one holder to each of `blocks`, which are held or evictable."""
        refs = self._refs
        self._hold([block for block in blocks if refs[block] == 0])
        for block in blocks:
            refs[block] += 1

    def release(self, blocks: list[int], spent: bool = False) -> None:
        """Remove one holder from each of `blocks`, which are in position order. Leaves become evictable first.

        With `spent` they are evicted before all others."""
        refs, cached, free = self._refs, self._cached, self._free
        evictable: list[int] = []
        for block in reversed(blocks):
            refs[block] -= 1
            if refs[block] == 0:
                (evictable if cached[block] else free).append(block)
        if spent:
            self._spent |= dict.fromkeys(evictable)
        else:
            self._evictable.add(evictable, blocks)

    def mark_cached(self, blocks: list[CachedBlock]) -> None:
        """These held blocks enter the cache, parents first."""
        cached = self._cached
        for block, _, _ in blocks:
            cached[block] = 1
        self._evictable.on_cached(blocks)

    def mark_spoilt(self, blocks: list[int]) -> None:
        """Take `blocks` out of the cache: no request finds them. They are free, or will be when they are released."""
        cached = [block for block in blocks if self._cached[block]]
        unheld = [block for block in cached if self._refs[block] == 0]
        self._hold(unheld)
        self._free += unheld
        self._forget(cached)

    def evict_unheld(self) -> None:
        """Free all evictable blocks."""
        self._free += self._evict(len(self._spent) + len(self._evictable))

    def _evict(self, count: int) -> list[int]:
        """Take the next `count` blocks out of the cache and return them."""
        blocks = list(islice(self._spent, count))
        for block in blocks:
            del self._spent[block]
        blocks += self._evictable.take(count - len(blocks))
        self._forget(blocks)
        return blocks

    def _hold(self, unheld: list[int]) -> None:
        """These spent or evictable blocks cannot be evicted from now on."""
        if self._spent:
            unspent = [block for block in unheld if block not in self._spent]
            for block in unheld:
                self._spent.pop(block, None)
            unheld = unspent
        self._evictable.remove(unheld)

    def _forget(self, blocks: list[int]) -> None:
        for block in blocks:
            self._cached[block] = 0
        self._evictable.on_uncached(blocks)
        self._on_evict(blocks)

    def _is_idle(self, block: int) -> bool:
        return block in self._spent or block in self._evictable

    def find_faults(self, held: Mapping[int, int]) -> list[str]:
        """Return one sentence for each block in a wrong place. `held` counts the holders of each held block."""
        places = Counter([*self._free, *self._spent, *self._evictable, *held])
        faults = []
        for block in range(NULL_BLOCK + 1, self.num_blocks):
            refs, wanted, is_idle = self._refs[block], held.get(block, 0), self._is_idle(block)
            if refs != wanted:
                faults.append(f"Block {block} counts {refs} holders, but {wanted} requests hold it.")
            if places[block] != 1 or (is_idle and not self._cached[block]):
                faults.append(f"Block {block} is free, evictable or held in {places[block]} places.")
        if self._cached[NULL_BLOCK] or places[NULL_BLOCK]:
            faults.append("The null block is cached, free or held.")
        return faults
