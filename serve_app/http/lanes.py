"""Threads for requests' long CPU work, and for work that waits for a child process.

A computing thread takes Python's lock from the event loop for some milliseconds at a time, so each lane has few
threads. Owners of waiting work take turns, so one client's requests do not delay other clients."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from runtime.background import in_background
from serve_app.http.limits import is_long
from serve_app.protocol.errors import ApiError

_T = TypeVar("_T")

_MAX_WAITING_BYTES = 256 << 20  # bodies in waiting work, for each owner
_BUSY_RETRY_S = 1.0
_MANY_QUOTES = 128  # a sign that there are many prompts, which cost more than their lengths


@dataclass(slots=True, eq=False)
class _Waiting:
    """Work before its start."""

    work: Callable[[], Any] | None  # None after it was cancelled
    num_bytes: int
    done: Future[Any]


class Lane:
    """Threads for one kind of work. Any number of event loops may share it."""

    def __init__(self, name: str, num_threads: int, max_bytes: int = _MAX_WAITING_BYTES) -> None:
        """`max_bytes` limits the waiting work of one owner; all owners have four times as much."""
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()  # waiting work by owner
        self._num_bytes: Counter[str] = Counter()  # waiting bytes by owner

    async def run(self, owner: str, work: Callable[[], _T], num_bytes: int = 0) -> _T:
        """Return the result of `work`, which a thread runs at its owner's turn. Cancellation removes waiting work.

        Raises the 429 if waiting work, including this one with its `num_bytes`, would hold too many bytes."""
        waiting = _Waiting(work, num_bytes, Future[_T]())
        with self._lock:
            of_owner, of_all = self._num_bytes[owner] + num_bytes, self._num_bytes.total() + num_bytes
            if of_owner > self._max_bytes or of_all > 4 * self._max_bytes:
                text = f"Long requests with {of_owner} bytes wait, above {self._max_bytes}; come back later."
                raise ApiError(429, text, code="long_requests_wait", retry_after_s=_BUSY_RETRY_S)
            self._num_bytes[owner] += num_bytes
            self._waiting.setdefault(owner, deque()).append(waiting)
        in_background(self._threads.submit(self._run_next), "the work of a lane")
        try:
            return await asyncio.wrap_future(waiting.done)
        except asyncio.CancelledError:
            self._remove(owner, waiting)
            raise

    def _remove(self, owner: str, waiting: _Waiting) -> Callable[[], Any] | None:
        """Remove work from the waiting work and return it; None if it was removed before."""
        with self._lock:
            work, waiting.work = waiting.work, None
            if work is not None:
                self._num_bytes[owner] -= waiting.num_bytes
                if not self._num_bytes[owner]:
                    del self._num_bytes[owner]
        return work

    def _run_next(self) -> None:
        with self._lock:
            owner, works = self._waiting.popitem(last=False)
            waiting = works.popleft()
            if works:
                self._waiting[owner] = works  # placed after the other owners
        if (work := self._remove(owner, waiting)) is None or not waiting.done.set_running_or_notify_cancel():
            return
        try:
            waiting.done.set_result(work())
        except BaseException as e:
            waiting.done.set_exception(e)


# Short chats wait for a child process that renders their template, and compute little.
SHORT_CHATS = Lane("short-chats", 4)
LONG_REQUESTS = Lane("long-requests", 2)
IMAGES = Lane("images", 4)  # its work waits for child processes that decode pictures, and for addresses
LONG_ANSWERS = Lane("long-answers", 1)


class NeedsStart(Exception):
    """Raised for a request that can be prepared after `start`, which returns when its engine or adapter is there."""

    def __init__(self, start: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self.start = start


async def run_preparation(
    body: bytes, owner: str, may_render: bool, work: Callable[[], _T], has_more: bool = False
) -> _T:
    """Return the result of `work`, which parses the request in `body`. It is repeated after a start that it needs.

    `may_render` is true if it may render a chat template, which the event loop never does. `has_more` is true if
    `work` reads much more than the body."""
    while True:
        try:
            if may_render and b"image" in body:
                return await IMAGES.run(owner, work, len(body))
            if has_more or is_long(body) or (not may_render and body.count(b'"') > _MANY_QUOTES):
                return await LONG_REQUESTS.run(owner, work, len(body))
            return await SHORT_CHATS.run(owner, work) if may_render else work()
        except NeedsStart as e:
            await e.start()


async def run_rendering(is_long: bool, owner: str, work: Callable[[], _T]) -> _T:
    """Return the result of `work`, which renders an answer."""
    return await LONG_ANSWERS.run(owner, work) if is_long else work()
