"""Pinning: a GPU's driver learns the region's memory piece by piece, so that the GPU can copy from and to it."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import weakref

import torch

from runtime.worker.cuda_driver import call

logger = logging.getLogger(__name__)

_PIECE_BYTES = 64 << 20  # a piece takes about 10 ms, and steps wait as long for the driver's lock
_RELAXED = 2  # capture mode: this thread's calls do not disturb a graph's capture in another thread


class Pinned:
    """A rank's payload. The first slots are pinned, more and more of them. A copy never crosses two pieces."""

    def __init__(self, payload: torch.Tensor, file: int, device: torch.device) -> None:
        """`payload` is [num_slots, slot_words] of the file with this descriptor. A slot has whole pages."""
        self._payload, self._file, self._device, self._stop = payload, file, device, threading.Event()
        self._pieces: list[int] = []  # addresses
        self.num_slots = len(payload) if device.type != "cuda" else 0  # the pinned ones; all of them without a GPU
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

    def _pin(self) -> None:
        start, slot_bytes = time.perf_counter(), self._payload.stride(0) * 8
        try:
            torch.cuda.mem_get_info(self._device)  # any call of the runtime gives this thread a context
            call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))
            for piece in self._payload.split(max(1, _PIECE_BYTES // slot_bytes)):
                if self._stop.is_set():
                    return
                address, size = ctypes.c_uint64(piece.data_ptr()), len(piece) * slot_bytes
                os.posix_fallocate(
                    self._file, piece.storage_offset() * 8, size
                )  # else the driver's lock is held longer
                call("cuMemHostRegister_v2", address, ctypes.c_size_t(size), ctypes.c_uint(0))
                self._pieces.append(address.value)
                self.num_slots += len(piece)
        except OSError as e:
            logger.warning("%d of %d slots of the tier are pinned: %s", self.num_slots, len(self._payload), e.strerror)
            return
        gib, seconds = len(self._payload) * slot_bytes / (1 << 30), time.perf_counter() - start
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
