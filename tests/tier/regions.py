"""Keys and payloads for tests of the tier."""

import hashlib

import numpy as np

from runtime.tier.region import Region
from runtime.tier.sums import payload_sums


def keys_of(*names: object) -> bytes:
    return b"".join(hashlib.blake2b(str(name).encode(), digest_size=16).digest() for name in names)


def one_by_one(keys: bytes) -> list[bytes]:
    return [keys[at : at + 16] for at in range(0, len(keys), 16)]


def payload_of(key: bytes, rank: int, slot_bytes: int) -> np.ndarray:
    """The bytes that belong to the key: any function of it."""
    return np.frombuffer(np.random.default_rng([*key, rank]).bytes(slot_bytes), np.uint8)


def write(region: Region, keys: bytes, ranks: list[int] | None = None) -> np.ndarray:
    """Write what belongs to the keys in their reserved slots, and commit it."""
    slots = region.slots_of(keys, ready=False)
    for rank in range(region.num_ranks) if ranks is None else ranks:
        for slot, key in zip(slots, one_by_one(keys), strict=True):
            region.payload(rank)[slot] = payload_of(key, rank, region.slot_bytes)
        region.commit(rank, slots, keys, payload_sums(region.payload(rank)[slots], keys))
    return slots


def store(region: Region, keys: bytes, salt: int = 0, expires: float = 0) -> list[bytes]:
    """Reserve and write keys; return the ones that have got a slot."""
    taken = region.reserve(keys, salt, expires)
    stored = [key for key, is_taken in zip(one_by_one(keys), taken, strict=True) if is_taken]
    write(region, b"".join(stored))
    return stored


def torn(region: Region) -> int:
    """Count READY entries with a sum that does not fit, or with other bytes than the key's."""
    entries = region.entries()
    slots, keys = entries.slots, entries.keys.tobytes()
    count = 0
    for rank in range(region.num_ranks):
        right = payload_sums(region.payload(rank)[slots], keys) == region.sums(rank, slots)
        count += int(np.count_nonzero(~right))
    return count
