"""How fast the entries on disk can be read. An engine must know it before it reads any: a load is only begun if it is
quicker than to compute the tokens."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from runtime.tier.region import Region

LEAST_BYTES, _MOST_BYTES = 16 << 20, 128 << 20  # bytes that are read
_THREADS = 8


def read_rate(disk: Region) -> float:
    """Read some entries of the first rank by several threads. Returns bytes per second, or 0 with too few entries."""
    slots = disk.entries().slots
    count = min(len(slots), max(1, _MOST_BYTES // disk.slot_bytes))
    if count * disk.slot_bytes < LEAST_BYTES:
        return 0.0
    chosen = slots[np.linspace(0, len(slots) - 1, count).astype(int)]

    def read(share: NDArray[np.int64]) -> None:
        with mmap.mmap(-1, disk.slot_bytes) as page_aligned:
            for slot in share.tolist():
                os.preadv(disk.files[0], [page_aligned], slot * disk.slot_bytes)

    with ThreadPoolExecutor(_THREADS) as pool:
        begin = time.perf_counter()
        list(pool.map(read, np.array_split(chosen, _THREADS)))
        return count * disk.slot_bytes / (time.perf_counter() - begin)
