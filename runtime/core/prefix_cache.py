"""The prefix cache: a tree of full KV blocks, found by identity.

A block's identity is the hash of its parent's identity and its own token ids; the root is the hash of the model's
fingerprint and the cache salt (C5). Equal identities therefore mean equal prefixes, and the tree needs no child
pointers: a path is looked up by hashing forward. The router and replay use the same functions.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b


def root_identity(fingerprint: str, salt: str) -> bytes:
    """The identity of the empty prefix, 16 bytes."""
    return blake2b(f"{fingerprint}\0{salt}".encode(), digest_size=16).digest()


def block_identity(parent: bytes, token_ids: array[int]) -> bytes:
    """The identity of a full block that holds `token_ids` (typecode 'i') after `parent`, 16 bytes."""
    return blake2b(token_ids.tobytes(), key=parent, digest_size=16).digest()


class PrefixCache:
    """Which block holds which identity. Reference counts and eviction order are the BlockPool's."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything (the runners' memory is gone)."""
        self._block_of: dict[bytes, int] = {}
        self._identity_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, identities: list[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of the path `identities`."""
        blocks = []
        for identity in identities:
            block = self._block_of.get(identity)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, identity: bytes, block: int) -> int:
        """The block that stands for `identity` from now on: `block`, or the one that was there first."""
        holder = self._block_of.setdefault(identity, block)
        if holder == block:
            self._identity_of[block] = identity
        return holder

    def evict(self, block: int) -> None:
        """The content of `block` is about to be overwritten."""
        del self._block_of[self._identity_of.pop(block)]
