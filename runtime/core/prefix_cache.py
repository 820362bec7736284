"""The prefix cache: a tree of full KV blocks, found by their hashes.

A block's hash covers its parent's hash, its own token ids and the images that these stand for. The root's covers the
model's fingerprint, the adapter and the cache salt (C5). Equal hashes therefore mean equal prefixes. A path is looked
up by hashing forward, without child pointers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import islice

from runtime.base.images import ImageSpan
from runtime.base.kv_cache_spec import KVGroupSpec
from runtime.core.block_pool import NULL_BLOCK

KEY_BYTES = 8  # hash bytes that routers receive; two equal keys cost a wrong choice of an engine
_STATE_MARK = 0x5A5A_A5A5_3C3C_C3C3


def state_key(key: int) -> int:
    """Return the key that stands for a snapshot of the state after the block with this key (int64)."""
    return key ^ _STATE_MARK


def root_hash(fingerprint: str, salt: str, adapter: str = "") -> bytes:
    """Return the 16-byte hash of the empty prefix, for a salt and an adapter's digest."""
    return blake2b(f"{fingerprint}\0{adapter}\0{salt}".encode(), digest_size=16).digest()


def hash_blocks(
    parent: bytes, token_ids: array[int], block_size: int, spans: Sequence[ImageSpan] = (), first: int = 0
) -> list[bytes]:
    """Return the 16-byte hashes of the blocks that hold `token_ids` (typecode 'i') after the block `parent`.

    The last block may be shorter than `block_size` tokens. `spans` has the request's images, in order, and `first` is
    the position of the first token. An image joins each block that it overlaps, with the block's offset in it."""
    data, block_hashes, size, number = token_ids.tobytes(), [], token_ids.itemsize, 0
    step = block_size * size
    for at in range(0, len(data), step):
        block = data[at : at + step]
        if number < len(spans):
            begin = first + at // size
            end = begin + len(block) // size
            while number < len(spans) and spans[number].end <= begin:
                number += 1
            for span in islice(spans, number, None):
                if span.begin >= end:
                    break
                block += span.image.digest + (begin - span.begin).to_bytes(4, "little", signed=True)
        parent = blake2b(block, key=parent, digest_size=16).digest()
        block_hashes.append(parent)
    return block_hashes


class PrefixCache:
    """Finds the block with a hash. Reference counts and eviction order are the BlockPool's."""

    # Set to {} to record inserts (True) and evictions (False), by the first KEY_BYTES of the hash. The cache feed
    # drains it. None while no front follows the cache.
    pending_events: dict[bytes, bool] | None = None

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._state_keys: dict[int, bytes] = {}  # keys of blocks with a snapshot (core/states/snapshot_pool.py)

    def reset(self) -> None:
        """Empty the cache, because the runners' memory is lost."""
        if self.pending_events is not None:
            self.pending_events |= dict.fromkeys(self.keys(), False)
        self._block_of.clear()
        self._hash_of.clear()
        self._state_keys.clear()

    def __len__(self) -> int:
        return len(self._block_of)

    def keys(self) -> list[bytes]:
        """Return the first KEY_BYTES of each cached block's hash, and the snapshots' keys."""
        return [*(block_hash[:KEY_BYTES] for block_hash in self._block_of), *self._state_keys.values()]

    def note_snapshot(self, block: int, is_kept: bool) -> None:
        """The cached `block` has a snapshot from now on, or no longer."""
        if is_kept:
            key = int.from_bytes(self._hash_of[block][:KEY_BYTES], "little", signed=True)
            self._state_keys[block] = state_key(key).to_bytes(KEY_BYTES, "little", signed=True)
        if self.pending_events is not None:
            self.pending_events[self._state_keys[block]] = is_kept
        if not is_kept:
            del self._state_keys[block]

    def match_prefix(self, block_hashes: list[bytes]) -> list[int]:
        """Return the blocks in the longest cached prefix of the path `block_hashes`."""
        blocks = []
        for one in block_hashes:
            block = self._block_of.get(one)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with a hash, or None."""
        return self._block_of.get(block_hash)

    def insert(self, block_hashes: list[bytes], blocks: list[int]) -> list[int]:
        """Store each block under its hash. Return the block of each hash: another one if that was stored first."""
        cached = list(map(self._block_of.setdefault, block_hashes, blocks))
        self._hash_of.update(zip(cached, block_hashes, strict=True))
        if self.pending_events is not None:
            for block_hash, block, holder in zip(block_hashes, blocks, cached, strict=True):
                if block == holder:
                    self.pending_events[block_hash[:KEY_BYTES]] = True
        return cached

    def evict(self, blocks: list[int]) -> None:
        """Remove these blocks before their content is overwritten."""
        hashes = [self._hash_of.pop(block) for block in blocks]
        for block_hash in hashes:
            del self._block_of[block_hash]
        if self.pending_events is not None:
            for block_hash in hashes:
                self.pending_events[block_hash[:KEY_BYTES]] = False

    def find_faults(self, is_cached: Callable[[int], bool]) -> list[str]:
        """Return one sentence for each hash with a block that the pool does not cache, or that has another hash."""
        pairs = self._hash_of.items()
        faults = [f"Block {block} has a hash, but is not cached." for block in self._hash_of if not is_cached(block)]
        return faults + [f"Block {b} has a hash that finds another." for b, h in pairs if self._block_of.get(h) != b]


def match_tables(
    caches: Sequence[PrefixCache], groups: Sequence[KVGroupSpec], block_hashes: list[bytes], block_size: int
) -> list[list[int]]:
    """Return each group's table for the longest prefix of the path `block_hashes` that all groups can continue.

    A group without a window needs all the prefix's blocks. A group with a window needs only the blocks that the next
    row reads, and its table begins with null blocks."""
    pairs = list(zip(caches, groups, strict=True))
    windows = [pair for pair in pairs if pair[1].window is not None]
    hashes, found = block_hashes, list[list[int]]()
    for cache, group in pairs:
        if group.window is None:
            found.append(cache.match_prefix(hashes))
            hashes = hashes[: len(found[-1])]
    num_blocks = _longest_with_windows(windows, hashes, len(hashes), block_size)
    full, tables = iter(found), []
    for cache, group in pairs:
        if group.window is None:
            tables.append(next(full)[:num_blocks])
            continue
        num_dead = group.num_dead_blocks(num_blocks * block_size, block_size)
        seen = map(cache.find, hashes[num_dead:num_blocks])
        tables.append([NULL_BLOCK] * num_dead + [block for block in seen if block is not None])
    return tables


def _longest_with_windows(
    windows: list[tuple[PrefixCache, KVGroupSpec]], block_hashes: list[bytes], num_blocks: int, block_size: int
) -> int:
    """Return the largest number of blocks, up to `num_blocks`, before which all windows are cached.

    A missing block spoils every prefix that ends after it and sees it. So the search continues before it, and looks at
    each block in a group once at most."""
    checked = [num_blocks] * len(windows)  # from here on each group has all blocks below num_blocks
    searching = True
    while searching:
        searching = False
        for number, (cache, group) in enumerate(windows):
            num_dead = group.num_dead_blocks(num_blocks * block_size, block_size)
            at = min(checked[number], num_blocks)
            while at > num_dead and cache.find(block_hashes[at - 1]) is not None:
                at -= 1
            checked[number] = at
            if at > num_dead:
                num_blocks, searching = at - 1, True
    return num_blocks
