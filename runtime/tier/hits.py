"""The longest prefix of a request that the device and the tier have together."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from runtime.core.block_pool import NULL_BLOCK
from runtime.core.kv_cache_manager import KVCacheManager
from runtime.core.prefix_cache import PrefixCache, match_tables
from runtime.core.request_state import RequestState
from runtime.core.states.state_cache_manager import StateCacheManager
from runtime.tier.keys import TierKeys, TierLookup, split

IN_TIER = -1  # in a table: the block must be loaded


class _Either(PrefixCache):
    """Finds a group's blocks on the device, and those in the tier as IN_TIER."""

    def __init__(self, cache: PrefixCache, ready: set[bytes]) -> None:
        self._cache, self._ready = cache, ready

    def find(self, block_hash: bytes) -> int | None:
        block = self._cache.find(block_hash)
        return IN_TIER if block is None and block_hash in self._ready else block

    def match_prefix(self, block_hashes: list[bytes]) -> list[int]:
        found = map(self.find, block_hashes)
        return [block for block in takewhile(lambda block: block is not None, found) if block is not None]


@dataclass(slots=True)
class Hit:
    """A prefix, of which the blocks that are IN_TIER must be loaded, and its state."""

    hashes: list[bytes]  # of its blocks
    tables: list[list[int]]  # each KV group's
    needs_state: bool = False  # the tier alone has the state at its end
    missing: list[tuple[int, int, bytes]] = field(default_factory=list)  # group, index and key of blocks to be loaded
    state_keys: list[bytes] = field(default_factory=list)

    @property
    def num_transfers(self) -> int:
        """Slots that must be read."""
        return len(self.missing) + len(self.state_keys)


class TierHits:
    """Looks prefixes up in the caches and the tier."""

    def __init__(self, kv_cache: KVCacheManager, index: TierLookup, keys: TierKeys) -> None:
        self._kv_cache, self._index, self._keys = kv_cache, index, keys

    def longest(self, state: RequestState) -> Hit:
        """Return the longest prefix of a waiting request."""
        hashes, size = self._kv_cache.prefix_hashes(state), self._kv_cache.block_size
        caches = [_Either(cache, self._ready(hashes, group)) for group, cache in enumerate(self._kv_cache.caches)]
        hit = Hit(hashes, match_tables(caches, self._kv_cache.groups, hashes, size))
        if isinstance(self._kv_cache, StateCacheManager):
            self._end_at_state(hit, self._kv_cache)
        hit.hashes = hashes = hashes[: len(hit.tables[0])]
        for group, table in enumerate(hit.tables):
            at = [index for index, block in enumerate(table) if block == IN_TIER]
            keys = split(self._keys.block_keys([hashes[index] for index in at], group))
            hit.missing += [(group, index, key) for index, key in zip(at, keys, strict=True)]
        if hit.needs_state:
            hit.state_keys = split(self._keys.state_keys(hashes[-1]))
        return hit

    def _ready(self, block_hashes: list[bytes], group: int) -> set[bytes]:
        """Return the hashes of blocks that only the tier has."""
        cache = self._kv_cache.caches[group]
        missing = [block_hash for block_hash in block_hashes if cache.find(block_hash) is None]
        if not missing:
            return set()
        found = self._index.find(self._keys.block_keys(missing, group)).tolist()
        return {block_hash for block_hash, is_found in zip(missing, found, strict=True) if is_found}

    def _end_at_state(self, hit: Hit, kv_cache: StateCacheManager) -> None:
        """Cut a prefix to its longest part with a snapshot of the state after it."""
        (table,) = hit.tables
        step = max(1, kv_cache.least_row // kv_cache.block_size)
        ends = list(range(len(table) // step * step, 0, -step))
        ready = self._index.find(self._keys.first_part_keys([hit.hashes[end - 1] for end in ends])) if ends else ()
        for end, may_be_stored in zip(ends, ready, strict=True):
            if table[end - 1] in kv_cache.snapshots:
                hit.tables = [table[:end]]
                return
            if may_be_stored and self._index.find(self._keys.state_keys(hit.hashes[end - 1])).all():
                hit.tables, hit.needs_state = [table[:end]], True
                return
        hit.tables = [[]]


def held_blocks(table: list[int]) -> list[int]:
    """Return the blocks of a table that the device has."""
    return [block for block in table if block not in (NULL_BLOCK, IN_TIER)]
