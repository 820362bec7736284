"""Transfers: copies between host and device without waits and without new allocations.

Such copies need pinned memory, and torch takes 0.05 ms to find some. So a step takes a `PinnedBuffer`, which is pinned
once. It gives the buffer back when its result is read, because the device does not use the buffer any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import torch

_FIRST_BYTES = 64 << 10
_ALIGNMENT = 16  # bytes

_TORCH: dict[Any, torch.dtype] = {
    np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32, np.uint8: torch.uint8,
}  # fmt: skip

T = TypeVar("T")


class PinnedBuffer:
    """The memory for one step's copies in both directions, and the event at its end."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self.done = torch.cuda.Event() if self._pinned else None
        self._memory = self._allocate(_FIRST_BYTES)
        self._used = 0

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def clear(self) -> None:
        """Begin a new step: the step before is over."""
        self._used = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for `count` values on the host. Earlier values stay valid, also if the buffer grows: torch keeps the old
        memory until its copies are done."""
        size = count * dtype.itemsize
        if self._used + size > len(self._memory):
            self._memory, self._used = self._allocate(2 * (self._used + size)), 0
        at, self._used = self._used, self._used - (-size // _ALIGNMENT * _ALIGNMENT)
        return self._memory[at : at + size].view(dtype)


class Transfers:
    """The copies of a device's steps. One thread begins steps and copies; any thread may wait for them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: deque[PinnedBuffer] = deque()
        self._now = PinnedBuffer(device)

    def begin(self) -> None:
        """Begin a step. All copies from now on belong to it."""
        self._now = self._free.pop() if self._free else PinnedBuffer(self.device)
        self._now.clear()

    def upload(self, *arrays: np.ndarray) -> torch.Tensor:
        """Arrays of one type, end to end, on the device; a single array keeps its shape."""
        flat = [a.reshape(-1) for a in arrays]
        host = self._now.take(sum(map(len, flat)), _TORCH[flat[0].dtype.type])
        np.concatenate(flat, out=host.numpy())
        device = host.to(self.device, non_blocking=True)
        return device.view(arrays[0].shape) if len(arrays) == 1 else device

    def download(self, x: torch.Tensor) -> torch.Tensor:
        """`x` on the host. Its content is valid from the end of the step until the result is made."""
        return self._now.take(x.numel(), x.dtype).view(x.shape).copy_(x, non_blocking=True)

    def end(self, result: Callable[[], T]) -> PendingResult[T]:
        """End a step after its last copy. `result` makes its result when all copies have arrived."""
        buffer = self._now
        if buffer.done is not None:
            buffer.done.record()
        return PendingResult(buffer, result, self._free)


class PendingResult(Generic[T]):
    """Waits for a step and returns its result. Several threads may call it, each more than once."""

    def __init__(self, buffer: PinnedBuffer, result: Callable[[], T], free: deque[PinnedBuffer]) -> None:
        self._buffer, self._make, self._free = buffer, result, free
        self._lock = threading.Lock()
        self._result: T | None = None

    def __call__(self) -> T:
        with self._lock:
            if self._result is None:
                if self._buffer.done is not None:
                    self._buffer.done.synchronize()
                self._result = self._make()
                self._free.append(self._buffer)
            return self._result
