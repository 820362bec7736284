"""Random pictures for requests."""

from __future__ import annotations

import base64
import io
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

_BLOCK = 16  # pixels a side of what one random color spreads over
_AHEAD = 8


class RandomImages:
    """JPEG pictures as data URLs. No two are equal.

    Another process draws them ahead, so that requests do not wait for it."""

    def __init__(self, width: int, height: int, count: int) -> None:
        """`count` pictures a request."""
        self._width, self._height, self._count = width, height, count
        self._ahead: deque[Future[tuple[str, ...]]] = deque()
        self._process = ProcessPoolExecutor(1, get_context("spawn"))

    def draw(self, rng: np.random.Generator) -> tuple[str, ...]:
        while len(self._ahead) <= _AHEAD:
            urls = self._process.submit(_urls, self._width, self._height, self._count, int(rng.integers(1 << 62)))
            self._ahead.append(urls)
        urls = self._ahead.popleft()
        return urls.result()


def _urls(width: int, height: int, count: int, seed: int) -> tuple[str, ...]:
    rng = np.random.default_rng(seed)
    return tuple(_url(width, height, rng) for _ in range(count))


def _url(width: int, height: int, rng: np.random.Generator) -> str:
    from PIL import Image

    shape = (-(-height // _BLOCK), -(-width // _BLOCK), 3)
    picture = Image.fromarray(rng.integers(0, 256, shape, np.uint8)).resize((width, height))
    picture.save(file := io.BytesIO(), "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
