"""Huge pages for files in memory: a fresh process maps them at once, and a GPU's driver pins them quickly.

A page of 4 KiB costs each process a fault, and the driver a search and an entry of its own. Linux gives a file in
memory huge pages if its mount asks for them, which /dev/shm seldom does. From Linux 6.1 on, MADV_COLLAPSE gathers a
range's pages in any case. They belong to the file, so that they outlive the process."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
from numpy.typing import NDArray

HUGE_BYTES = 2 << 20
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_POPULATE_WRITE = 23  # madvise: give a range its pages; kernels before Linux 5.14 refuse it
_COLLAPSE = 25  # madvise: gather the range's pages in huge ones
_c = ctypes.CDLL(None, use_errno=True)
_c.mmap.restype = ctypes.c_void_p
_c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_c.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_file(file: int) -> NDArray[np.uint8]:
    """Map a whole file for reading and writing, at an address that suits huge pages. Raises OSError."""
    size = os.fstat(file).st_size
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = np.frombuffer(mmap.mmap(-1, size + HUGE_BYTES, private), np.uint8)
    memory = room[-room.ctypes.data % HUGE_BYTES :][:size]
    address, access = memory.ctypes.data, mmap.PROT_READ | mmap.PROT_WRITE
    if _c.mmap(address, size, access, mmap.MAP_SHARED | _MAP_FIXED, file, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memory


def give_pages(address: int, size: int, huge: bool = True) -> None:
    """Give a range of `map_file` its pages before their first use. Bytes in the file stay.

    With `huge` these are huge pages where the kernel can gather them, and the range grows to whole ones. Small pages
    remain, for example, where a GPU's driver has pinned them."""
    begin, end = address // HUGE_BYTES * HUGE_BYTES if huge else address, address + size
    for at in range(begin, end, HUGE_BYTES):
        # A range without any page cannot be gathered.
        if not huge or not _advise(at, mmap.PAGESIZE, _POPULATE_WRITE) or not _advise(at, HUGE_BYTES, _COLLAPSE):
            _advise(max(at, address), min(at + HUGE_BYTES, end) - max(at, address), _POPULATE_WRITE)


def _advise(address: int, size: int, advice: int) -> bool:
    """Return true if the kernel has done it."""
    done: int = _c.madvise(address, size, advice)
    return done == 0
