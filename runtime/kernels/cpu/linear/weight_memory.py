"""Memory for the weights of a CPU, in huge pages where the system has them.

A step reads all weights once. With pages of 4 KB, the processor walks the page table for every 64 cache lines."""

from __future__ import annotations

import math
import mmap
import threading

import torch

_SLAB = 64 << 20  # bytes that are mapped at once; untouched pages take no memory
_ALIGNED = 64  # bytes of a cache line
_lock = threading.Lock()
_free = torch.empty(0, dtype=torch.uint8)  # the rest of the newest slab


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor with undefined content, beside the tensors that were made before it."""
    global _free
    size = math.prod(shape) * dtype.itemsize
    whole = -(-size // _ALIGNED) * _ALIGNED
    with _lock:
        if len(_free) < whole:
            _free = _map(max(whole, _SLAB))
        own, _free = _free[:whole], _free[whole:]
    return own[:size].view(dtype).view(shape)


def _map(size: int) -> torch.Tensor:
    # Private memory: the system gives huge pages to shared memory only later, if at all.
    mapped = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)
