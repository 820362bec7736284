"""The tier's index as an engine sees it, and its keys."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from runtime.base.model_info import TierInfo
from runtime.tier.region import RegionFigures

KEY_BYTES = 16
_KEY = np.dtype("V16")


class TierLookup(Protocol):
    """Looks up entries by keys of 16 bytes."""

    def find(self, keys: bytes) -> NDArray[np.bool_]:
        """Return which keys can be loaded [n]."""
        ...


class TierIndex(TierLookup, Protocol):
    """Entries of a tier (runtime/tier/region.py). Other engines of the node change it, too."""

    def touch(self, keys: bytes, expires: float = 0) -> None:
        """Set the last use to now, and with `expires` the time.time() until which entries are kept if possible."""
        ...

    def reserve(self, keys: bytes, salt: int, expires: float = 0) -> NDArray[np.bool_]:
        """Return which keys have got a place that must be written now [n]. The others are there, and are touched, or
        find no place."""
        ...

    def drop(self, keys: bytes) -> None:
        """Forget entries, which are damaged or spoilt."""
        ...

    def figures(self) -> RegionFigures:
        """Count entries and bytes."""
        ...


class TierKeys:
    """Keys of an engine's blocks and states.

    A block's hash covers all that its bytes depend on (C5), except for versions and the device: the environment. Its
    KV group and the environment are added by an exclusive or with a random pattern. So no two keys are equal."""

    def __init__(self, info: TierInfo, num_groups: int) -> None:
        def pattern(name: str) -> NDArray[np.uint64]:
            digest = blake2b(name.encode(), key=info.environment[:64], digest_size=KEY_BYTES).digest()
            return np.frombuffer(digest, np.uint64)

        self._blocks: list[NDArray[np.uint64]] = [pattern(f"block {group}") for group in range(num_groups)]
        self._parts = np.array([pattern(f"state {part}") for part in range(info.state_slots)], np.uint64).reshape(-1, 2)

    def block_keys(self, block_hashes: Sequence[bytes], group: int) -> bytes:
        """Return the keys of blocks in a KV group."""
        return bytes((_words(block_hashes) ^ self._blocks[group]).tobytes())

    def first_part_keys(self, block_hashes: Sequence[bytes]) -> bytes:
        """Return the key of each state's first part. `block_hashes` are of the blocks that end the states' prefixes."""
        return bytes((_words(block_hashes) ^ self._parts[0]).tobytes())

    def state_keys(self, block_hash: bytes) -> bytes:
        """Return the keys of all parts in a state."""
        return bytes((_words([block_hash]) ^ self._parts).tobytes())


def split(keys: bytes) -> list[bytes]:
    """Return each key by itself."""
    found: list[bytes] = np.frombuffer(keys, _KEY).tolist()
    return found


def salt_number(salt: str) -> int:
    """Return a number that stands for a cache salt, by which tiers share their room fairly; 0 without a salt."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=8).digest()) if salt else 0


def _words(block_hashes: Sequence[bytes]) -> NDArray[np.uint64]:
    return np.frombuffer(b"".join(block_hashes), np.uint64).reshape(-1, 2)
