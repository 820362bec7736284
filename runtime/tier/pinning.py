"""Pinning: a GPU's driver learns the region's memory piece by piece, so that the GPU can copy from and to it.

Slots that have memory from an earlier process are pinned during the start, so that the first requests load from
them at full speed. They come first, because the region fills its first ways first. The others follow when the runner
is ready: to populate gigabytes takes seconds, which would delay the start.

Two threads populate memory without the driver's lock, and a third one pins it. How fast the driver pins depends on
the pages' size. So a piece is as large as it pins in `_HELD_S`. Calls are large, too: while another thread computes in
Python, each of them waits 5 ms for Python's lock.

Loads from pinned slots are slower while others are pinned, so pinning pauses. Copies that pass through a bounce
end the pause: only pinning makes them faster.
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

_PART_BYTES = 64 << 20  # a thread populates this much at a time
_LEAST_BYTES, _MOST_COUNT = 4 << 20, 256  # a piece is a multiple of the first, up to the second
_HELD_S = 5e-4  # a piece's time, which steps wait for the driver's lock
_START_HELD_S = 1e-2  # the same before there are steps
_BREAK_S = 5e-4  # time for others between two pieces, since that lock is not fair
_QUIET_S, _LOOK_S = 0.5, 0.02  # a pause after a load from pinned slots; between two looks for its end
_SLOW_S = 4.0  # a part that took longer to populate: memory is in fragments, so huge pages are not worth their wait
_NUM_THREADS = 2
_PORTABLE, _DEVICEMAP = 1, 2  # flags for all contexts, and for the device's addresses
_RELAXED = 2  # capture mode: this thread's calls do not disturb a graph's capture in another thread


class Pinned:
    """A rank's payload. The first slots are pinned, more and more of them. A copy never crosses two pieces."""

    def __init__(self, payload: torch.Tensor, device: torch.device, num_backed: int) -> None:
        """Begin with the first `num_backed` slots, on a GPU. `payload` is [num_slots, slot_words] of whole pages."""
        self._payload, self._device, self._stop = payload, device, threading.Event()
        self._slot_bytes = payload.stride(0) * 8
        self._pieces: list[int] = []  # addresses
        self._huge = True  # huge pages are worth a try
        self.num_slots = len(payload) if device.type != "cuda" else 0  # the pinned ones; all of them without a GPU
        self.is_mapped = True  # the device can use the pinned slots' host addresses
        self._num_backed, self._is_ready = num_backed, threading.Event()
        self._quiet_until = 0.0  # time.monotonic() until which nothing is pinned
        # It keeps the memory until the driver has unpinned it. When the process ends, the driver does so itself.
        self._unpin = weakref.finalize(self, _unpin, self._pieces, device, payload)
        self._unpin.atexit = False
        self._thread = threading.Thread(target=self._pin, name="tier-pinning", daemon=True)
        if device.type == "cuda":
            self._thread.start()

    def finish(self) -> None:
        """Pin the other slots, too: the runner is ready."""
        self._is_ready.set()

    def note_copy(self, is_load: bool, is_bounced: bool) -> None:
        """A copy begins. A load pauses the pinning; slots that pass through a bounce end the pause."""
        if is_bounced:
            self._quiet_until = 0.0
        elif is_load:
            self._quiet_until = time.monotonic() + _QUIET_S

    def _wait_for_quiet(self) -> bool:
        """Wait for the end of a pause, and leave time for others. Return True if all is to stop."""
        stops = self._stop.wait(_BREAK_S)
        while not stops and time.monotonic() < self._quiet_until:
            stops = self._stop.wait(_LOOK_S)
        return stops

    @property
    def is_whole(self) -> bool:
        """True if all slots are pinned."""
        return self.num_slots == len(self._payload)

    @property
    def is_pinning(self) -> bool:
        """True while the thread runs. It ends when all slots are pinned, or after an error."""
        return self._thread.is_alive()

    def _populate_all(self, parts: Sequence[tuple[int, torch.Tensor]], done: threading.Semaphore) -> None:
        for first, part in parts:
            if first >= self._num_backed:
                self._is_ready.wait()
                self._wait_for_quiet()
            self._populate(part)
            done.release()

    def _populate(self, part: torch.Tensor) -> None:
        if not self._stop.is_set():
            start = time.perf_counter()
            give_pages(part.view(torch.uint8).view(-1).numpy(), self._huge)
            self._huge &= time.perf_counter() - start < _SLOW_S

    def _pin(self) -> None:
        start, total, length = time.perf_counter(), len(self._payload), max(1, _PART_BYTES // self._slot_bytes)
        parts = [(at, self._payload[at : at + length]) for at in range(0, total, length)]
        populated = [threading.Semaphore(0) for _ in range(_NUM_THREADS)]  # each thread's parts, which take turns
        for first, done in enumerate(populated):
            own = parts[first::_NUM_THREADS]
            threading.Thread(target=self._populate_all, args=(own, done), name="tier-pages", daemon=True).start()
        try:
            torch.cuda.mem_get_info(self._device)  # any call of the runtime gives this thread a context
            call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))
            turns, num_populated, num_backed = cycle(populated), 0, -(-self._num_backed // length) * length
            least, count = max(1, _LEAST_BYTES // self._slot_bytes), 1
            while not self.is_whole:
                is_start = self.num_slots < num_backed
                if self.num_slots == num_backed:
                    count = 1  # steps begin
                end = min(self.num_slots + count * least, num_backed if is_start else total, total)
                while num_populated < end:
                    next(turns).acquire()
                    num_populated += length
                if self._wait_for_quiet():
                    return
                begin = time.thread_time()  # CPU time; waits for locks do not count
                self._pin_piece(self._payload[self.num_slots : end])
                share = (_START_HELD_S if is_start else _HELD_S) / max(time.thread_time() - begin, 1e-6)
                count = max(1, min(int(count * share), 2 * count, _MOST_COUNT))
        except OSError as e:
            self._stop.set()
            logger.warning("%d of %d slots of the tier are pinned: %s", self.num_slots, total, e.strerror)
            return
        gib, seconds = total * self._slot_bytes / (1 << 30), time.perf_counter() - start
        logger.info("tier: %.1f GiB pinned in %d pieces, %.1f s after it was opened", gib, len(self._pieces), seconds)

    def _pin_piece(self, piece: torch.Tensor) -> None:
        address, size = ctypes.c_uint64(piece.data_ptr()), ctypes.c_size_t(len(piece) * self._slot_bytes)
        call("cuMemHostRegister_v2", address, size, ctypes.c_uint(_PORTABLE | _DEVICEMAP))
        self._pieces.append(address.value)
        try:
            mapped = ctypes.c_uint64()
            call("cuMemHostGetDevicePointer_v2", ctypes.byref(mapped), address, ctypes.c_uint(0))
            self.is_mapped &= mapped.value == address.value
        except OSError:
            self.is_mapped = False
        self.num_slots += len(piece)

    def close(self) -> None:
        """Unpin all. No copy is in flight."""
        self._stop.set()
        self._is_ready.set()
        if self.is_pinning:
            self._thread.join()
        self.num_slots = 0
        self._unpin()


def _unpin(pieces: list[int], device: torch.device, _: torch.Tensor) -> None:
    if pieces:
        torch.cuda.synchronize(device)  # copies may be in flight
    while pieces:
        call("cuMemHostUnregister", ctypes.c_uint64(pieces.pop()))
