"""LoopThread: an event loop in a thread of its own, for blocking callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from runtime.base.types import CallboardError

Answer = TypeVar("Answer")


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # Serve brings it; engines' frames cost half as much with it
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class LoopThread:
    """An event loop that runs until `close`. The thread does not keep its process alive."""

    def __init__(self, name: str) -> None:
        self.loop = _new_loop()
        self._starting, self._is_closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        for task in (tasks := asyncio.all_tasks(self.loop)):
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.run_until_complete(asyncio.sleep(0))  # other threads' futures follow their tasks
        self.loop.close()

    def start(self, work: Coroutine[Any, Any, Answer]) -> Future[Answer]:
        """Run a coroutine on the loop. Raises CallboardError after `close`."""
        with self._starting:  # the loop cancels work that started before its stop
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(work, self.loop)
        work.close()
        raise CallboardError("The client is closed; connect another with RolloutClient.connect.")

    def call(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Run a coroutine on the loop, and return its result. An interrupted caller cancels it."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop and cancel its tasks."""
        with self._starting:
            if not self._is_closed:
                self.loop.call_soon_threadsafe(self.loop.stop)
            self._is_closed = True
        self._thread.join()
