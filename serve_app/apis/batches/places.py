"""The places for requests of batches at one front, and how the API keys divide them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """Room for `most` requests from all batches together.

    A key takes a free place. Without one it still gets its share: `most` over the number of keys with requests. So a
    key with requests that do not end delays no other key."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used: Counter[str] = Counter()  # places by owner
        self._asking: Counter[str] = Counter()  # requests that wait for one, by owner
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def of(self, owner: str) -> AsyncIterator[None]:
        """Hold a place during the block, after waiting for it."""
        self._asking[owner] += 1
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: self._may_take(owner))
                self._used[owner] += 1
        finally:
            self._asking[owner] -= 1
        try:
            yield
        finally:
            self._used[owner] -= 1
            self._used, self._asking = +self._used, +self._asking
            async with self._changed:
                self._changed.notify_all()

    def _may_take(self, owner: str) -> bool:
        num_keys = len(self._used.keys() | self._asking.keys())
        return self._used.total() < self._most or self._used[owner] < max(1, self._most // num_keys)
