"""Regions of the tier: what is found, given away, kept and refused."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from runtime.tier.region import Region
from runtime.tier.sums import payload_sums

SLOT = 4096


def keys_of(*names: object) -> bytes:
    return b"".join(hashlib.blake2b(str(name).encode(), digest_size=16).digest() for name in names)


def write(region: Region, keys: bytes, ranks: list[int] | None = None) -> np.ndarray:
    """Write bytes drawn from the key to the reserved slots."""
    slots = region.slots_of(keys, ready=False)
    for rank in range(region.num_ranks) if ranks is None else ranks:
        for i, slot in enumerate(slots):
            seed = int.from_bytes(keys[16 * i : 16 * i + 8], "little") + rank
            region.payload(rank)[slot] = np.random.default_rng(seed).integers(0, 256, region.slot_bytes, np.uint8)
        region.commit(rank, slots, keys, payload_sums(region.payload(rank)[slots], keys))
    return slots


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "base" / "app-1234"


@pytest.fixture
def region(folder: Path) -> Region:
    return Region.open(folder, "layout", 1024, SLOT, 2)


def test_an_entry_is_found_once_all_ranks_have_written(region):
    keys = keys_of(*range(50))
    assert region.reserve(keys, salt=0).all()
    assert not region.reserve(keys, salt=0).any()
    write(region, keys, [0])
    assert not region.find(keys).any()
    slots = write(region, keys, [1])
    assert region.find(keys).all()
    assert (region.slots_of(keys, ready=True) == slots).all()
    assert (region.slots_of(keys, ready=False) == -1).all()
    assert region.figures().used_bytes == 50 * 2 * SLOT
