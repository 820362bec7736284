"""Pinning: a GPU's driver learns the region's memory piece by piece, so that the GPU can copy from and to it.

Threads first give the memory its pages, without the driver's lock, while the runner still starts. Pinning waits
until the runner is ready, since it would slow down the capture of graphs."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

from runtime.worker.cuda_driver import call

logger = logging.getLogger(__name__)

_PIECE_BYTES = 64 << 20  # a piece takes about 10 ms, and steps wait as long for the driver's lock
_POPULATE_WRITE = 23  # madvise: give a range its pages; kernels before Linux 5.14 refuse it
_NUM_THREADS = 8
_RELAXED = 2  # capture mode: this thread's calls do not disturb a graph's capture in another thread


class Pinned:
    """A rank's payload. The first slots are pinned, more and more of them. A copy never crosses two pieces."""

    def __init__(self, payload: torch.Tensor, device: torch.device) -> None:
        """`payload` is [num_slots, slot_words]. A slot has whole pages. On a GPU, threads begin to populate it."""
        self._payload, self._device, self._stop = payload, device, threading.Event()
        self._slot_bytes = payload.stride(0) * 8
        self._pieces: list[int] = []  # addresses
        self.num_slots = len(payload) if device.type != "cuda" else 0  # the pinned ones; all of them without a GPU
        # It keeps the memory until the driver has unpinned it. When the process ends, the driver does so itself.
        self._unpin = weakref.finalize(self, _unpin, self._pieces, device, payload)
        self._unpin.atexit = False
        self._thread = threading.Thread(target=self._pin, name="tier-pinning", daemon=True)
        self._parts = payload.split(max(1, _PIECE_BYTES // self._slot_bytes))
        if device.type == "cuda":
            self._pool = ThreadPoolExecutor(_NUM_THREADS, "tier-pages")
            self._populated = [self._pool.submit(self._populate, part) for part in self._parts]
            self._pool.shutdown(wait=False)

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

    def _populate(self, part: torch.Tensor) -> None:
        if not self._stop.is_set():
            address, size = ctypes.c_void_p(part.data_ptr()), ctypes.c_size_t(len(part) * self._slot_bytes)
            ctypes.CDLL(None).madvise(address, size, _POPULATE_WRITE)  # memory without pages is pinned more slowly

    def _pin(self) -> None:
        start = time.perf_counter()
        try:
            torch.cuda.mem_get_info(self._device)  # any call of the runtime gives this thread a context
            call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))
            for part, populated in zip(self._parts, self._populated, strict=True):
                populated.result()
                if self._stop.is_set():
                    return
                address, size = ctypes.c_uint64(part.data_ptr()), ctypes.c_size_t(len(part) * self._slot_bytes)
                call("cuMemHostRegister_v2", address, size, ctypes.c_uint(0))
                self._pieces.append(address.value)
                self.num_slots += len(part)
        except OSError as e:
            logger.warning("%d of %d slots of the tier are pinned: %s", self.num_slots, len(self._payload), e.strerror)
            return
        gib, seconds = len(self._payload) * self._slot_bytes / (1 << 30), time.perf_counter() - start
        logger.info("tier: %.1f GiB pinned in %.1f s", gib, seconds)

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
