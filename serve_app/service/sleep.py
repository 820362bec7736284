"""The sleep of one model: when its engines may end, and how one starts again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.wire.engine_client import EngineClient
from runtime.background import in_background
from serve_app.service.engine_errors import as_answers


class ModelSleep:
    """Starts the engine of a model that may have none, and sets how long it stays without requests."""

    def __init__(self, client: EngineClient, idle_s: float | None = None, waits: Callable[[], str] = str) -> None:
        """`idle_s` is the idle time after which the engines end; None if they stay.

        `waits` returns why the model waits for memory, empty if it does not."""
        self._client, self._idle_s, self.waits = client, idle_s, waits

    @property
    def is_allowed(self) -> bool:
        """True if the engines end at some time without requests."""
        return self._idle_s is not None

    async def start_engine(self) -> None:
        """Return when there is an engine; a sleeping model starts one. Raises ApiError if none starts."""
        with as_answers():
            await self._client.started()

    async def load(self, keep_s: float | None) -> None:
        """Start an engine unless `keep_s` is 0. It ends after this idle time, None for the usual one."""
        if self.is_allowed and keep_s != 0:
            await self.start_engine()
        if self.is_allowed and keep_s is not None:
            await self._client.keep(keep_s)

    async def remaining_s(self) -> float | None:
        """Return the time until the model sleeps, infinite if it never does; None if it sleeps."""
        if self._idle_s is None:
            return math.inf
        found = await self._client.keep(None)
        times = [(self._idle_s if each.keep_s < 0 else each.keep_s) - each.idle_s for each in found]
        return max(0.0, *times) if times else None

    @contextmanager
    def kept(self, keep_s: float | None) -> Iterator[None]:
        """Set the idle time at the end of the block, unless it is None."""
        try:
            yield
        finally:
            if keep_s is not None:
                in_background(asyncio.create_task(self._client.keep(keep_s)), "the idle time of a model")
