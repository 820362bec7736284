"""The start of an engine for a model without one: streams and callers wait for it, and get the error if none starts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

from actors.front.client_stream import ClientStream
from actors.front.parked import ParkedStreams
from actors.wire.engine_client import EngineRefusal, Refusal
from actors.wire.link_messages import WaitLimits
from runtime.background import in_background
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError

logger = logging.getLogger(__name__)

_MAX_WAKES = 20  # failed starts in a row that end the waiting requests
_WAKE_PAUSE_S = 0.5  # seconds between two calls for an engine: the one that answered may end at once


@dataclass(frozen=True, slots=True)
class ScaleFromZero:
    """For a model that can scale to zero: how to start an engine, and which requests may wait for it."""

    wake: Callable[[], Awaitable[object]]  # returns when there is an engine; raises CallboardError if none can start
    limits: WaitLimits  # limits of the waiting requests
    expected: ModelInfo | None = None  # facts before an engine reports them, without a fingerprint

    @classmethod
    def of(cls, config: EngineConfig, wake: Callable[[], Awaitable[object]], expected: ModelInfo | None) -> Self:
        """Return the rules of an engine's own queue."""
        sizes = config.max_queued_requests, config.max_queued_tokens, config.max_queued_bytes
        return cls(wake, WaitLimits(*sizes, config.queue_timeout_s), expected)


class Waker:
    """Calls for an engine while streams or callers wait for one."""

    def __init__(
        self, zero: ScaleFromZero, streams: ParkedStreams, fail: Callable[[ClientStream, CallboardError], None]
    ) -> None:
        """`streams` wait for an engine; `fail` ends one of them."""
        self._zero, self._streams, self._fail = zero, streams, fail
        self._callers: set[asyncio.Future[None]] = set()
        self._first: asyncio.Event | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def must_start(self) -> bool:
        """True if an engine is wanted without a request: the application's first one."""
        return self._first is not None

    def wake_until(self, is_served: asyncio.Event) -> None:
        """Call for an engine, also without requests, until the first one is healthy."""
        self._first = is_served
        self.wake()

    def wake(self) -> None:
        """Call for an engine, unless a call is under way."""
        if self._task is None or self._task.done():
            self._task = in_background(asyncio.create_task(self._keep_waking()), "starting an engine")

    async def engine(self) -> None:
        """Wait for an engine within the limits of requests. Raises EngineRefusal and CallboardError."""
        if len(self._callers) >= self._zero.limits.max_requests:
            text = (
                f"{len(self._callers)} requests wait for an engine, the limit (max_queued_requests); try again later."
            )
            raise EngineRefusal(text, Refusal.BUSY, _WAKE_PAUSE_S)
        caller = asyncio.get_running_loop().create_future()
        self._callers.add(caller)
        self.wake()
        try:
            async with asyncio.timeout(self._zero.limits.timeout_s):
                await caller
        except TimeoutError:
            text = "The request waited longer than queue_timeout_s while there was no engine."
            raise EngineRefusal(text, Refusal.LATE) from None
        finally:
            self._callers.discard(caller)

    def found(self) -> None:
        """An engine is healthy: the callers go on."""
        for caller in self._callers:
            if not caller.done():
                caller.set_result(None)

    def refuse(self, error: CallboardError) -> None:
        """End all callers with an error."""
        for caller in self._callers:
            if not caller.done():
                caller.set_exception(error)

    def cancel(self) -> None:
        """Call for no engine any more."""
        if self._task is not None:
            self._task.cancel()

    async def _keep_waking(self) -> None:
        num_failed = 0
        while self._streams or self._callers or (self._first is not None and not self._first.is_set()):
            try:
                await self._zero.wake()
                num_failed = 0
            except Exception as e:  # unless it is a CallboardError, the engine may have ended meanwhile
                num_failed += 1
                logger.warning("no engine could be started: %s: %s", type(e).__name__, e)
                error = e if isinstance(e, CallboardError) else CallboardError(f"No engine could be started: {e}.")
                if error is e or num_failed >= _MAX_WAKES:
                    self.refuse(error)
                    for stream in [s for s in self._streams if not s.accepted]:
                        self._fail(stream, error)
            await asyncio.sleep(_WAKE_PAUSE_S)
