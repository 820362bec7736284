"""Threads for the CPU work of requests that the event loop must not do, and for work that waits for a child process.

Each thread that computes takes Python's lock from the event loop for some milliseconds at a time, so each lane has few
threads. The owners of the waiting work take turns, so that one client's requests do not keep others waiting.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from serve_app.limits import is_long

_T = TypeVar("_T")

_MANY_QUOTES = 128  # of prompts: each costs more than its length


class Lane:
    """Threads for work of one kind. Any number of event loops may share it."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Callable[[], Any], Future[Any]]]] = OrderedDict()  # by owner

    async def run(self, owner: str, work: Callable[[], _T]) -> _T:
        """The result of `work`, which a thread does at its owner's turn; cancelled before that, it is never done."""
        done: Future[_T] = Future()
        with self._lock:
            self._waiting.setdefault(owner, deque()).append((work, done))
        self._threads.submit(self._run_next)
        return await asyncio.wrap_future(done)

    def _run_next(self) -> None:
        with self._lock:
            owner, works = self._waiting.popitem(last=False)
            work, done = works.popleft()
            if works:
                self._waiting[owner] = works  # at the end: the other owners come first
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(work())
        except BaseException as e:
            done.set_exception(e)


# Short chats wait for a child process that renders their template, and compute little.
SHORT_CHATS = Lane("short-chats", 4)
LONG_REQUESTS = Lane("long-requests", 2)
LONG_ANSWERS = Lane("long-answers", 1)


async def run_preparation(body: bytes, owner: str, may_render: bool, work: Callable[[], _T]) -> _T:
    """The result of `work`, which reads the request in `body`. `may_render` is true if it may render a chat template:
    the event loop never waits for that."""
    if is_long(body) or (not may_render and body.count(b'"') > _MANY_QUOTES):
        return await LONG_REQUESTS.run(owner, work)
    return await SHORT_CHATS.run(owner, work) if may_render else work()


async def run_rendering(is_long: bool, owner: str, work: Callable[[], _T]) -> _T:
    """The result of `work`, which renders an answer."""
    return await LONG_ANSWERS.run(owner, work) if is_long else work()
