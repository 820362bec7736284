"""The files of a region: create, attach, replace and wipe them, whatever other processes do at the same time.

A region is created under another name and renamed as a whole. A shared lock on `head` shows that a process uses it.

Payloads have huge pages where the kernel gathers them (MADV_COLLAPSE, Linux 6.1). Mounts seldom give these unasked.
A page of 4 KiB costs each new process a fault. The pages outlive the process."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runtime.base.errors import CallboardError

_GIB = 2**30
_FORMAT = "callboard kv tier 1"
_ATTACH_S = 5.0  # most time for other processes to replace the region
WAYS = 32
MAX_RANKS = 16
SET = np.dtype(  # 64 bytes a slot; the fields of a set's ways are neighbours, for quick look-ups
    [
        ("low", "<u8", WAYS),  # the key's words; 0 in a free slot
        ("high", "<u8", WAYS),
        ("done", "u1", (WAYS, MAX_RANKS)),  # 1 for each rank that has written its payload
        ("salt", "<u8", WAYS),
        ("used", "<f8", WAYS),  # time of the last use or reservation
        ("start", "<u4", WAYS),  # start time of the process that reserved the slot
        ("pid", "<u4", WAYS),
        ("expires", "<u4", WAYS),  # time until which a hint keeps the entry; 0 without a hint
        ("has_pages", "<u4", WAYS),  # the file system has given all ranks' payloads their memory
    ]
)
_NAMES = ["head", "acks", "slots", "sums", "payload"]  # the files in the order of their deletion

HUGE_BYTES = 2 << 20  # a huge page on x86-64
_SMALL_BYTES = 8 << 20  # small pages that are given at once
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_POPULATE_WRITE = 23  # madvise: give a range its pages; kernels before Linux 5.14 refuse it
_COLLAPSE = 25  # madvise: gather the range's pages in huge ones
_c = ctypes.CDLL(None, use_errno=True)
_c.mmap.restype = ctypes.c_void_p
_c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_c.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def open_files(folder: Path, layout: str, num_slots: int | None, slot_bytes: int, num_ranks: int) -> tuple[int, int]:
    """Attach or create, as `Region.open`. Returns the locked `head` and the number of slots."""
    head = f"{_FORMAT}\n{layout}\n{slot_bytes} bytes, {num_ranks} ranks, slots: "
    end = time.monotonic() + _ATTACH_S
    try:
        while time.monotonic() < end:
            if (found := _attach(folder, head, num_slots, slot_bytes, num_ranks)) is not None:
                return found
            if not folder.exists():
                _create(folder, head, num_slots, slot_bytes, num_ranks)
    except OSError as e:
        raise _unusable(folder, str(e.strerror)) from None
    raise _unusable(folder, "another process replaces it")


def wipe_files(folder: Path) -> None:
    """Delete a region, as `Region.wipe`."""
    with contextlib.suppress(FileNotFoundError), descriptor(folder, os.O_DIRECTORY) as place:
        _wipe(place, folder)


def _lengths(num_slots: int, slot_bytes: int, num_ranks: int) -> dict[str, int]:
    """Return the bytes of each file except the head."""
    sizes = {"slots": num_slots // WAYS * SET.itemsize}
    sizes |= {f"sums-{rank}": num_slots * 8 for rank in range(num_ranks)}
    return sizes | {f"payload-{rank}": num_slots * slot_bytes for rank in range(num_ranks)}


def _create(folder: Path, head: str, num_slots: int | None, slot_bytes: int, num_ranks: int) -> None:
    """Create the region as a whole, unless another process was quicker."""
    folder.parent.mkdir(0o700, parents=True, exist_ok=True)
    if folder.parent.stat().st_uid not in (0, os.geteuid()):
        raise _unusable(folder, f"{folder.parent} belongs to another user")
    space = os.statvfs(folder.parent)
    free, slot = space.f_bavail * space.f_frsize, slot_bytes * num_ranks
    num_slots = (free // 2 // slot if num_slots is None else num_slots) // WAYS * WAYS
    lengths = _lengths(num_slots, slot_bytes, num_ranks)
    if not num_slots:
        raise CallboardError(
            f"The KV tier in {folder.parent} has room for less than {WAYS} blocks, {WAYS * slot / _GIB:.3f} GiB; "
            f"give it more memory, or switch it off."
        )
    if free < (needed := sum(lengths.values())):
        raise CallboardError(
            f"{folder.parent} has {free / _GIB:.2f} GiB free and the KV tier needs {needed / _GIB:.2f}: "
            f"make the tier smaller, or start a container with a larger --shm-size."
        )
    head += f"{num_slots}\n"
    new = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        for name, length in {"head": len(head.encode()), **lengths}.items():
            with descriptor(new / name, os.O_RDWR | os.O_CREAT | os.O_EXCL) as file:
                os.ftruncate(file, length)
                if not name.startswith("payload"):
                    os.posix_fallocate(file, 0, length)
                if name == "head":
                    os.pwrite(file, head.encode(), 0)
        try:
            new.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _attach(folder: Path, head: str, num_slots: int | None, slot_bytes: int, num_ranks: int) -> tuple[int, int] | None:
    """Return a fitting region's locked head and number of slots; None to try again.

    A region that does not fit is wiped unless a process uses it."""
    num_slots = num_slots and num_slots // WAYS * WAYS
    with contextlib.ExitStack() as stack:
        try:
            place = stack.enter_context(descriptor(folder, os.O_DIRECTORY | os.O_NOFOLLOW))
        except FileNotFoundError:
            return None
        if (found := os.fstat(place)).st_uid != os.geteuid() or found.st_mode & 0o077:
            raise _unusable(folder, "other users have access to it")
        try:
            file = stack.enter_context(descriptor("head", os.O_RDWR | os.O_NOFOLLOW, place))
        except FileNotFoundError:
            _wipe(place, folder)
            if os.listdir(place):
                raise _unusable(folder, "it has other files") from None
            return None
        text = os.pread(file, 2**16, 0).decode(errors="replace")
        size = int(text[len(head) : -1]) if text.startswith(head) and text[len(head) : -1].isdecimal() else 0
        fits = size > 0
        for name, length in _lengths(size, slot_bytes, num_ranks).items():
            try:
                fits &= os.stat(name, dir_fd=place).st_size == length
            except FileNotFoundError:
                fits = False
        if (not fits or num_slots not in (None, size)) and locks(file, fcntl.LOCK_EX):
            if os.fstat(file).st_nlink:
                _wipe(place, folder)
            return None
        if not locks(file, fcntl.LOCK_SH) or not os.fstat(file).st_nlink:
            time.sleep(0.001)  # a process replaces it
            return None
        if not fits:
            raise _unusable(folder, "a process uses it with another layout")
        return os.dup(file), size  # the lock belongs to both descriptors


def _wipe(place: int, folder: Path) -> None:
    """Delete the region's files in the open folder `place`, and the folder if it is empty."""
    names = [name for name in os.listdir(place) if name.partition("-")[0] in _NAMES]
    for name in sorted(names, key=lambda name: _NAMES.index(name.partition("-")[0])):
        with contextlib.suppress(FileNotFoundError):
            with descriptor(name, os.O_RDWR | os.O_NOFOLLOW, place) as file:
                _free_pages(file)
            os.unlink(name, dir_fd=place)
    with contextlib.suppress(OSError):  # other files
        folder.rmdir()


def _free_pages(file: int) -> None:
    """Make the file's bytes zeros without memory, if its file system can do this."""
    with contextlib.suppress(OSError, ValueError), mmap.mmap(file, 0) as memory:
        memory.madvise(mmap.MADV_REMOVE)


@contextlib.contextmanager
def descriptor(path: str | Path, flags: int, place: int | None = None) -> Iterator[int]:
    file = os.open(path, flags, 0o600, dir_fd=place)
    try:
        yield file
    finally:
        os.close(file)


def locks(file: int, kind: int) -> bool:
    """Lock the file if that is possible now."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unusable(folder: Path, reason: str) -> CallboardError:
    return CallboardError(f"The KV tier cannot use {folder}: {reason}; give it another folder, or switch it off.")


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


def give_pages(memory: NDArray[np.uint8], huge: bool = True) -> None:
    """Give a part of `map_file` its pages before their first use. Bytes in the file stay.

    With `huge` these are huge pages where the kernel can gather them, and the part grows to whole ones. Small pages
    remain, for example, where a GPU's driver has pinned them."""
    begin, end = memory.ctypes.data, memory.ctypes.data + len(memory)
    if huge:
        first = begin // HUGE_BYTES * HUGE_BYTES
        memory[::HUGE_BYTES].max(initial=0)  # touch each huge page: one without any page cannot be gathered
        memory[-1:].max(initial=0)
        if _advise(first, -(-end // HUGE_BYTES) * HUGE_BYTES - first, _COLLAPSE):
            return
    for at in range(begin, end, _SMALL_BYTES):  # other threads that map memory wait for each call
        _advise(at, min(at + _SMALL_BYTES, end) - at, _POPULATE_WRITE)


def _advise(address: int, size: int, advice: int) -> bool:
    """Return true if the kernel has done it."""
    done: int = _c.madvise(address, size, advice)
    return done == 0
