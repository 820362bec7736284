"""Memory for the weights of a CPU, in huge pages where the system has them.

A step reads all weights once. With pages of 4 KB, the processor walks the page table for every 64 cache lines."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SLAB = 64 << 20  # bytes that are mapped at once; untouched pages take no memory
_ALIGNED = 64  # bytes per cache line
_lock = threading.RLock()  # a tensor may end, and take it again, in a thread that has it


class _Slab:
    """Mapped memory, from which tensors are cut one after another."""

    def __init__(self, size: int) -> None:
        # Private memory: the system gives huge pages to shared memory only later, if at all.
        self.memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.size, self.used = size, 0


_newest = _Slab(_ALIGNED)
_ended: dict[int, list[tuple[_Slab, int]]] | None = None  # memory of ended tensors, by size; see `recycling`


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor with undefined content, next to the tensors that were made before it."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype)
    slab, start = _cut(-(-size // _ALIGNED) * _ALIGNED)
    own = (ctypes.c_char * size).from_buffer(slab.memory, start)
    weakref.finalize(own, _keep, slab, start, -(-size // _ALIGNED) * _ALIGNED).atexit = False
    return torch.frombuffer(own, dtype=dtype).view(shape)


@contextmanager
def recycling() -> Iterator[None]:
    """A context in which new tensors take the memory of tensors that end there, if they have the same size.

    Fresh memory costs more than the numbers that are written to it: the system clears each page."""
    global _ended
    with _lock:
        _ended = {}
    try:
        yield
    finally:
        with _lock:
            _ended = None


def _cut(size: int) -> tuple[_Slab, int]:
    """Memory of this many bytes: a slab, and the place in it."""
    global _newest
    with _lock:
        if _ended is not None and (found := _ended.get(size)):
            return found.pop()
        if _newest.size - _newest.used < size:
            _newest = _Slab(max(size, _SLAB))
        start = _newest.used
        _newest.used += size
        return _newest, start


def _keep(slab: _Slab, start: int, size: int) -> None:
    """A tensor has ended."""
    with _lock:
        if _ended is not None:
            _ended.setdefault(size, []).append((slab, start))
