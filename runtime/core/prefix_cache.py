"""The prefix cache: a tree of full KV blocks, found by their hashes.

A block's hash covers its parent's hash and its own token ids; the root's covers the model's fingerprint and the cache
salt (C5). Equal hashes therefore mean equal prefixes, and the tree needs no child pointers: a path is looked up by
hashing forward.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b


def root_hash(fingerprint: str, salt: str) -> bytes:
    """The hash of the empty prefix, 16 bytes."""
    return blake2b(f"{fingerprint}\0{salt}".encode(), digest_size=16).digest()


def block_hash(parent: bytes, token_ids: array[int]) -> bytes:
    """The hash of a full block that holds `token_ids` (typecode 'i') after the block `parent`, 16 bytes."""
    return blake2b(token_ids.tobytes(), key=parent, digest_size=16).digest()


class PrefixCache:
    """Finds the block with a hash. Reference counts and eviction order are the BlockPool's."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything (the runners' memory is gone)."""
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def match_prefix(self, block_hashes: list[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of the path `block_hashes`."""
        blocks = []
        for one in block_hashes:
            block = self._block_of.get(one)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, block_hash: bytes, block: int) -> int:
        """Returns the block that stands for the hash from now on: `block`, or the one that was there first."""
        holder = self._block_of.setdefault(block_hash, block)
        if holder == block:
            self._hash_of[block] = block_hash
        return holder

    def evict(self, block: int) -> None:
        """The content of `block` is about to be overwritten."""
        del self._block_of[self._hash_of.pop(block)]

    def find_faults(self, is_cached: Callable[[int], bool]) -> list[str]:
        """One sentence for each block that has a hash here, but is not cached by the pool, or has another's."""
        pairs = self._hash_of.items()
        faults = [f"Block {block} has a hash, but is not cached." for block in self._hash_of if not is_cached(block)]
        return faults + [f"Block {b} has a hash that finds another." for b, h in pairs if self._block_of.get(h) != b]
