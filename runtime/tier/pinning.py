"""Pinning: a GPU's driver learns the region's memory piece by piece, so that the GPU can copy from and to it."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref

import torch

from runtime.worker.cuda_driver import call

logger = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 30  # larger pieces fail or keep the driver's lock for long
_RELAXED = 2  # capture mode: this thread's calls do not disturb a graph's capture in another thread


class Pinned:
    """A rank's payload. The first slots are pinned, more and more of them. A copy never crosses two pieces."""

    def __init__(self, payload: torch.Tensor, device: torch.device) -> None:
        """`payload` is [num_slots, slot_words]. A slot has whole pages. A thread begins to pin on a GPU."""
        self._payload, self._device, self._stop = payload, device, threading.Event()
        self._pieces: list[int] = []  # addresses
        self.num_slots = len(payload) if device.type != "cuda" else 0  # the pinned ones; all of them without a GPU
        # It keeps the memory until the driver has unpinned it. When the process ends, the driver does so itself.
        self._unpin = weakref.finalize(self, _unpin, self._pieces, device, payload)
        self._unpin.atexit = False
        self._thread = threading.Thread(target=self._pin, name="tier-pinning", daemon=True)
        if device.type == "cuda":
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
            call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))
            torch.cuda.set_device(self._device)
            for piece in self._payload.split(max(1, _PIECE_BYTES // slot_bytes)):
                if self._stop.is_set():
                    return
                address = ctypes.c_uint64(piece.data_ptr())
                call("cuMemHostRegister_v2", address, ctypes.c_size_t(len(piece) * slot_bytes), ctypes.c_uint(0))
                self._pieces.append(address.value)
                self.num_slots += len(piece)
        except OSError as e:
            logger.warning("%d of %d slots of the tier are pinned: %s", self.num_slots, len(self._payload), e.strerror)
            return
        size, seconds = len(self._payload) * slot_bytes / (1 << 30), time.perf_counter() - start
        logger.info("tier: %.1f GiB pinned in %.1f s", size, seconds)

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
