"""Batch: the requests of one call, a limited number of them in flight, and their results as they end.

A batch runs on the client's event loop. The caller's iterator of prompts runs in a helper thread, because it may block.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import islice
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from actors.client.engines import RolloutGroup
from actors.wire.engine_client import EngineRefusal, Refusal
from runtime.spec.types import CallboardError, FinishReason, Request, RequestOutput

_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.1, 5.0  # before a refused request is sent again

Result = TypeVar("Result")


class Job(NamedTuple):
    """A request of a batch."""

    request: Request
    prompt_index: int
    choice: int
    error: str = ""  # why it cannot be sent; empty if it can


class BatchEnd:
    """The last item of a batch. `error` is what ended it early; None if it is complete."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error


class Batch(Generic[Result]):
    """The requests of one call."""

    def __init__(
        self,
        group: RolloutGroup,
        jobs: Iterator[Sequence[Job]],
        result: Callable[[Job, RequestOutput], Result],
        max_in_flight: int | None,
        max_unread: int | None,
    ) -> None:
        """`jobs` yields the jobs of one prompt after another, and `result` makes a result of an output."""
        self._group, self._jobs, self._result = group, jobs, result
        self._max_in_flight = max_in_flight  # sent, and not ended; None for what the engines compute and a fourth more
        self._max_unread = max_unread  # results that the caller may leave unread; None for 4 times max_in_flight
        self._next: deque[Job] = deque()  # of the last pulled prompts
        self._is_exhausted = False  # no prompts are left
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._cap = math.inf  # requests in flight that the engines' queues take, by the last refusal
        self._num_delivered = 0
        self.deliver: Callable[[Result | BatchEnd], object]  # takes each result, then a BatchEnd
        self.num_read = 0  # results that the caller has read; set by its thread
        self.waits_for_reader = False

    @property
    def _limit(self) -> int:
        """Without a limit of the caller, enough requests wait in the engines that none of their places stays empty."""
        most = self._max_in_flight or max(1, self._group.num_places * 5 // 4)
        return most if most < self._cap else int(self._cap)

    def _is_held(self) -> bool:
        most = 4 * self._limit if self._max_unread is None else self._max_unread
        # The flag is set first: a reader that counts its last result before this test then wakes the batch.
        self.waits_for_reader = True
        self.waits_for_reader = self._num_delivered - self.num_read >= max(1, most)
        return self.waits_for_reader

    def wake(self) -> None:
        """The caller has read a result."""
        self._changed.set()

    async def run(self) -> None:
        """Send all requests, and deliver their results. A cancelled run aborts the requests in flight."""
        error: Exception | None = None
        try:
            while await self._has_next():
                task = asyncio.create_task(self._complete(self._next.popleft()))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
        except asyncio.CancelledError:
            error = CallboardError("The client was closed before its rollouts had ended.")
            raise
        except Exception as e:  # of the caller's iterator of prompts
            error = e
        finally:
            for task in self._tasks:
                task.cancel()
            self.deliver(BatchEnd(error))

    async def _has_next(self) -> bool:
        """Wait until another request may be sent. Returns False when all have ended."""
        while True:
            while len(self._tasks) >= self._limit or self._is_held():
                await self._change()
            if not self._next and not self._is_exhausted:
                pulled = await asyncio.to_thread(self._pull, self._limit - len(self._tasks))
                self._next.extend(job for jobs in pulled for job in jobs)
                self._is_exhausted = not pulled
            if self._next or not self._tasks:
                return bool(self._next)
            await self._change()  # an end, or a refused request

    def _pull(self, num_prompts: int) -> list[Sequence[Job]]:
        return list(islice(self._jobs, num_prompts))

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._changed.set()

    async def _complete(self, job: Job) -> None:
        try:
            output = _failed(job.request, job.error) if job.error else await self._group.complete(job.request)
        except EngineRefusal as e:
            if e.reason is not Refusal.NEVER:
                await self._try_later(job, e)
                return
            output = _failed(job.request, str(e))
        except CallboardError as e:
            output = _failed(job.request, str(e))
        self._cap += 1 / self._cap  # one more after as many ends: the engines may have room again
        self._num_delivered += 1
        self.deliver(self._result(job, output))

    async def _try_later(self, job: Job, refusal: EngineRefusal) -> None:
        """Send a refused request again when another one has ended, or after a pause if none is in flight."""
        num_others = len(self._tasks) - 1
        self._cap = max(1, num_others)
        self._next.appendleft(job)
        if not num_others:
            await asyncio.sleep(min(max(refusal.retry_after_s, _LEAST_PAUSE_S), _MOST_PAUSE_S))


def _failed(request: Request, error: str) -> RequestOutput:
    return RequestOutput(request.request_id, [], FinishReason.ERROR, error=error)


class Results(Iterator[Result]):
    """Iterates over the results of a batch, which runs on an event loop from the start. `close` aborts the rest."""

    def __init__(self, loop: asyncio.AbstractEventLoop, batch: Batch[Result]) -> None:
        self._loop, self._batch, self._has_ended = loop, batch, False
        self._items: SimpleQueue[Result | BatchEnd] = SimpleQueue()
        batch.deliver = self._items.put
        self._running: Future[Any] = asyncio.run_coroutine_threadsafe(batch.run(), loop)

    def __next__(self) -> Result:
        if self._has_ended:
            raise StopIteration
        item = self._items.get()
        if isinstance(item, BatchEnd):
            self._has_ended = True
            if item.error is not None:
                raise item.error
            raise StopIteration
        self._batch.num_read += 1
        if self._batch.waits_for_reader:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._batch.wake)
        return item

    def close(self) -> None:
        """Abort the requests that have not ended."""
        if not self._has_ended:
            self._has_ended = True
            with suppress(RuntimeError):  # the loop has ended
                self._running.cancel()

    def __del__(self) -> None:
        self.close()
