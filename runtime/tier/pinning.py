"""Pinning: a GPU's driver learns the region's memory piece by piece, so that the GPU can copy from and to it.

It begins when the runner is ready, because it would slow down the start. Populating memory delays weights, and
the driver's lock delays captures of graphs. Two threads populate memory without that lock, and a third one pins it.
All three pause while copies pass through a bounce: these need the lock and the memory's speed.

How fast the driver pins depends on the pages' size. So a piece is as large as it pins in `_HELD_S`.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from itertools import cycle

import torch

from runtime.tier.region_files import give_pages
from runtime.worker.cuda_driver import call

logger = logging.getLogger(__name__)

_PART_BYTES = 4 << 20  # a piece has whole parts; small pages of one take about 0.6 ms
_MOST_PARTS = 256
_HELD_S = 5e-4  # a piece's time, which steps wait for the driver's lock
_BREAK_S = 5e-4  # time for others between two pieces, since that lock is not fair
_SLOW_S = 0.5  # a part that took longer to populate: memory is in fragments, so huge pages are not worth their wait
_NUM_THREADS = 2
_MOST_PAUSE_S = 0.1  # limit of each pause, so that pinning ends although copies never do
_PORTABLE, _DEVICEMAP = 1, 2  # flags for all contexts, and for the device's addresses
_RELAXED = 2  # capture mode: this thread's calls do not disturb a graph's capture in another thread


class Pinned:
    """A rank's payload. The first slots are pinned, more and more of them. A copy never crosses two pieces."""

    def __init__(self, payload: torch.Tensor, device: torch.device) -> None:
        """`payload` is [num_slots, slot_words]. A slot has whole pages."""
        self._payload, self._device, self._stop = payload, device, threading.Event()
        self._slot_bytes = payload.stride(0) * 8
        self._pieces: list[int] = []  # addresses
        self._huge = True  # huge pages are worth a try
        self.num_slots = len(payload) if device.type != "cuda" else 0  # the pinned ones; all of them without a GPU
        self.is_mapped = True  # the device can use the pinned slots' host addresses
        self._lock, self._num_pauses, self._may_run = threading.Lock(), 0, threading.Event()
        self._may_run.set()
        # It keeps the memory until the driver has unpinned it. When the process ends, the driver does so itself.
        self._unpin = weakref.finalize(self, _unpin, self._pieces, device, payload)
        self._unpin.atexit = False
        self._thread = threading.Thread(target=self._pin, name="tier-pinning", daemon=True)

    def begin(self) -> None:
        """Begin to pin in a thread, on a GPU."""
        if self._device.type == "cuda":
            self._thread.start()

    @property
    def is_whole(self) -> bool:
        """True if all slots are pinned."""
        return self.num_slots == len(self._payload)

    @property
    def is_pinning(self) -> bool:
        """True while the thread runs. It ends when all slots are pinned, or after an error."""
        return self._thread.is_alive()

    def pause(self) -> None:
        """Pause after the current piece until as many calls of `resume`, from any threads."""
        with self._lock:
            self._num_pauses += 1
            self._may_run.clear()

    def resume(self) -> None:
        """End one pause."""
        with self._lock:
            self._num_pauses -= 1
            if not self._num_pauses:
                self._may_run.set()

    def _populate_all(self, parts: Sequence[torch.Tensor], done: threading.Semaphore) -> None:
        for part in parts:
            self._populate(part)
            done.release()

    def _populate(self, part: torch.Tensor) -> None:
        if not self._stop.is_set():
            self._may_run.wait(_MOST_PAUSE_S)
            start = time.perf_counter()
            give_pages(part.data_ptr(), len(part) * self._slot_bytes, self._huge)
            self._huge &= time.perf_counter() - start < _SLOW_S

    def _pin(self) -> None:
        start, parts = time.perf_counter(), self._payload.split(max(1, _PART_BYTES // self._slot_bytes))
        populated = [threading.Semaphore(0) for _ in range(_NUM_THREADS)]  # each thread's parts, which take turns
        for first, done in enumerate(populated):
            own = parts[first::_NUM_THREADS]
            threading.Thread(target=self._populate_all, args=(own, done), name="tier-pages", daemon=True).start()
        try:
            torch.cuda.mem_get_info(self._device)  # any call of the runtime gives this thread a context
            call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))
            turns, count = cycle(populated), 1
            while not self.is_whole:
                part = self._payload[self.num_slots :][: count * len(parts[0])]
                for _ in range(-(-len(part) // len(parts[0]))):
                    next(turns).acquire()
                self._may_run.wait(_MOST_PAUSE_S)
                if self._stop.wait(_BREAK_S):
                    return
                begin = time.perf_counter()
                self._pin_part(part)
                share = _HELD_S / (time.perf_counter() - begin)
                count = max(1, min(int(count * share), 2 * count, _MOST_PARTS))
        except OSError as e:
            self._stop.set()
            logger.warning("%d of %d slots of the tier are pinned: %s", self.num_slots, len(self._payload), e.strerror)
            return
        gib, seconds = len(self._payload) * self._slot_bytes / (1 << 30), time.perf_counter() - start
        logger.info("tier: %.1f GiB pinned in %.1f s, in %d pieces", gib, seconds, len(self._pieces))

    def _pin_part(self, part: torch.Tensor) -> None:
        address, size = ctypes.c_uint64(part.data_ptr()), ctypes.c_size_t(len(part) * self._slot_bytes)
        call("cuMemHostRegister_v2", address, size, ctypes.c_uint(_PORTABLE | _DEVICEMAP))
        self._pieces.append(address.value)
        try:
            mapped = ctypes.c_uint64()
            call("cuMemHostGetDevicePointer_v2", ctypes.byref(mapped), address, ctypes.c_uint(0))
            self.is_mapped &= mapped.value == address.value
        except OSError:
            self.is_mapped = False
        self.num_slots += len(part)

    def close(self) -> None:
        """Unpin all. No copy is in flight."""
        self._stop.set()
        if self.is_pinning:
            self._thread.join()
        self.num_slots = 0
        self._unpin()


def _unpin(pieces: list[int], device: torch.device, _: torch.Tensor) -> None:
    if pieces:
        torch.cuda.synchronize(device)  # copies may be in flight
    while pieces:
        call("cuMemHostUnregister", ctypes.c_uint64(pieces.pop()))
