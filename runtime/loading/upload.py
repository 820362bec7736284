"""Copies from host memory to a GPU at the full speed of the link."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

_BUFFER_BYTES = 64 << 20
_LEAST_SHARED = 1 << 20  # bytes that one thread copies before others would have begun
_THREADS = 4  # fill a buffer together: one core copies more slowly than the link sends


class Uploader:
    """Two pinned buffers in turn: while the GPU fetches one, threads fill the other.

    Pageable memory would be copied twice, and new memory for each tensor would be mapped page by page."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._fetched = [torch.cuda.Event() for _ in range(2)]
        self._next = 0
        self._pool = ThreadPoolExecutor(_THREADS)

    def upload(self, data: memoryview, out: torch.Tensor) -> None:
        """Copy `data` to `out`, uint8 [len(data)] on a GPU, on its current stream; `data` may be freed on return."""
        source, stream = np.frombuffer(data, np.uint8), torch.cuda.current_stream(out.device)
        for start in range(0, len(source), _BUFFER_BYTES):
            part = source[start : start + _BUFFER_BYTES]
            filled, fetched = self._buffers[self._next][: len(part)], self._fetched[self._next]
            self._next ^= 1
            fetched.synchronize()
            self._fill(filled.numpy(), part)
            out[start : start + len(part)].copy_(filled, non_blocking=True)
            fetched.record(stream)

    def _fill(self, target: np.ndarray, source: np.ndarray) -> None:
        if len(source) < _LEAST_SHARED:
            np.copyto(target, source)
            return
        parts = zip(np.array_split(target, _THREADS), np.array_split(source, _THREADS), strict=True)
        list(self._pool.map(lambda pair: np.copyto(*pair), parts))
