"""Batch: one call's requests, a limited number in flight, and their results as they end.

A batch runs on the client's event loop. The caller's iterator of prompts runs in a helper thread, because it may block.
Each prompt is sent when it comes."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, NamedTuple, TypeVar

from actors.client.engines import RolloutGroup
from actors.client.loop_thread import LoopThread
from actors.wire.engine_client import EngineRefusal, Refusal
from runtime.base.plain_values import integer
from runtime.base.types import CallboardError, FinishReason, Request, RequestOutput

_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.1, 5.0  # pause before a refused request is sent again
_GIVE_UP_S = 600.0  # refusals with nothing in flight, before a refused request fails

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Job(NamedTuple):
    """A request of a batch."""

    request: Request
    prompt_index: int
    choice: int
    error: str = ""  # why it cannot be sent; empty if it can


class BatchEnd:
    """The last item of a batch. `error` is what ended it early; None if it is complete."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class _Prompts:
    """Reads the caller's iterator in a thread of its own, one permitted prompt after another.

    The iterator may block. The thread does not keep its process alive, and ends with its batch."""

    def __init__(self, jobs: Iterator[Sequence[Job]], on_news: Callable[[], None]) -> None:
        """`on_news` is called on the event loop after each prompt, and at the end."""
        self._jobs, self._on_news, self._loop = jobs, on_news, asyncio.get_running_loop()
        self._permits: SimpleQueue[None] = SimpleQueue()
        self._num_permits = self._num_read = 0
        self.next: deque[Job] = deque()  # jobs for the prompts that have come
        self.is_exhausted = self._is_closed = self._has_news = False
        self.error: Exception | None = None  # the iterator's error
        threading.Thread(target=self._read, name="prompts", daemon=True).start()

    @property
    def num_permitted(self) -> int:
        """Prompts that have not come yet."""
        return self._num_permits - self._num_read

    def permit(self, num_prompts: int) -> None:
        """Read more prompts."""
        self._num_permits += num_prompts
        for _ in range(num_prompts):
            self._permits.put(None)

    def close(self) -> None:
        """End the thread, at once or when the iterator yields."""
        self._is_closed = True
        self._permits.put(None)

    def _read(self) -> None:
        with suppress(RuntimeError):  # the loop has ended
            while self._permits.get() is None and not self._is_closed and not self.is_exhausted:
                try:
                    jobs = next(self._jobs, None)
                except BaseException as e:  # SystemExit would end the loop
                    self.error = e if isinstance(e, Exception) else CallboardError(f"The prompts ended with {e!r}.")
                    jobs = None
                self.next.extend(jobs or ())
                self._num_read += 1
                self.is_exhausted = jobs is None
                if not self._has_news:  # one call reports all prompts until it runs
                    self._has_news = True
                    self._loop.call_soon_threadsafe(self._report)

    def _report(self) -> None:
        self._has_news = False
        self._on_news()


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
        """`jobs` yields one prompt's jobs after another's, and `result` makes a result from an output."""
        self._group, self._jobs, self._result = group, jobs, result
        # Sent, and not ended; None for what the engines compute and a fourth more.
        self._max_in_flight = None if max_in_flight is None else integer(max_in_flight, "max_in_flight", 1)
        # Results that the caller may leave unread; None for 4 times max_in_flight.
        self._max_unread = None if max_unread is None else integer(max_unread, "max_unread", 0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._cap = math.inf  # requests in flight that the engines' queues take, by the last refusal
        self._refused_since: float | None = None  # refused since, with nothing else in flight; None if not refused
        self._num_delivered = 0
        self._error: BaseException | None = None  # a result's error
        self.num_read = 0  # results that the caller has read; set by its thread
        self.waits_for_reader = False

    def start(self, thread: LoopThread, deliver: Callable[[Result | BatchEnd], object]) -> Future[None]:
        """Run on the loop of a thread. `deliver` takes each result there, then a BatchEnd, also after a cancellation.

        Raises CallboardError if the thread has ended."""
        self._deliver = deliver
        running = thread.start(self._run())
        running.add_done_callback(self._finish)
        return running

    def _finish(self, running: Future[None]) -> None:
        if running.cancelled():  # perhaps before it began
            error: BaseException | None = CallboardError("The client was closed before its rollouts had ended.")
        else:
            error = running.exception()
        with suppress(RuntimeError):  # the reader's loop has ended
            self._deliver(BatchEnd(error))

    @property
    def _limit(self) -> int:
        """Without the caller's limit, enough requests wait in the engines that all places stay filled."""
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

    async def _run(self) -> None:
        """Send all requests, and deliver their results. A cancelled run aborts the requests in flight."""
        self._prompts = _Prompts(self._jobs, self._changed.set)
        try:
            while await self._has_next():
                task = asyncio.create_task(self._complete(self._prompts.next.popleft()))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
        finally:
            self._prompts.close()
            for task in self._tasks:
                task.cancel()

    async def _has_next(self) -> bool:
        """Wait until another request may be sent. Returns False when all have ended."""
        prompts = self._prompts
        while True:
            is_exhausted = prompts.is_exhausted  # it is read first, since the thread sets it last
            if (error := self._error or prompts.error) is not None:
                raise error
            room = self._limit - len(self._tasks)
            if room > 0 and not self._is_held():
                if prompts.next:
                    return True
                if is_exhausted and not self._tasks:
                    return False
                prompts.permit(0 if is_exhausted else max(0, room - prompts.num_permitted))
            self._changed.clear()
            await self._changed.wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error
        self._changed.set()

    async def _complete(self, job: Job) -> None:
        try:
            output = _failed(job.request, job.error) if job.error else await self._group.complete(job.request)
        except EngineRefusal as e:
            if e.reason is not Refusal.NEVER and self._may_try_later():
                await self._try_later(job, e)
                return
            output = _failed(job.request, str(e))
        except CallboardError as e:
            output = _failed(job.request, str(e))
        except Exception as e:
            logger.exception("a rollout failed")
            output = _failed(job.request, f"The request failed: {type(e).__name__}: {e}")
        self._cap += 1 / self._cap  # one more after as many ends: the engines may have room again
        self._refused_since = None
        self._num_delivered += 1
        self._deliver(self._result(job, output))

    def _may_try_later(self) -> bool:
        """False if the engines have refused all requests of this batch for _GIVE_UP_S."""
        now = time.monotonic()
        self._refused_since = now if self._refused_since is None or len(self._tasks) > 1 else self._refused_since
        return now - self._refused_since < _GIVE_UP_S

    async def _try_later(self, job: Job, refusal: EngineRefusal) -> None:
        """Send a refused request again when another one has ended, or after a pause if none is in flight."""
        num_others = len(self._tasks) - 1
        self._cap = max(1, num_others)
        self._prompts.next.appendleft(job)
        if not num_others:
            await asyncio.sleep(min(max(refusal.retry_after_s, _LEAST_PAUSE_S), _MOST_PAUSE_S))


def _failed(request: Request, error: str) -> RequestOutput:
    return RequestOutput(request.request_id, [], FinishReason.ERROR, error=error)


class Results(Iterator[Result]):
    """Iterates over the results of a batch, which runs on an event loop from the start. `close` aborts the rest."""

    _has_ended = True  # unless it has begun

    def __init__(self, thread: LoopThread, batch: Batch[Result]) -> None:
        self._loop, self._batch = thread.loop, batch
        self._items: SimpleQueue[Result | BatchEnd] = SimpleQueue()
        self._running = batch.start(thread, self._items.put)
        self._has_ended = False

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
            self._items.put(BatchEnd(None))  # wakes a reader in another thread
            with suppress(RuntimeError):  # the loop has ended
                self._running.cancel()

    def __del__(self) -> None:
        self.close()
