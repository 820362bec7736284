"""The limits of an engine's queue, and when a client that meets one should come back."""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Iterator

from actors.engine.held_requests import HeldRequests
from actors.engine.link_server import Stream
from actors.wire.engine_client import Refusal
from actors.wire.messages import Refused, Submit
from runtime.core.request_state import RequestState, RequestStatus
from runtime.core.scheduler import Scheduler
from runtime.policy.queue_sizes import QueueSizes
from runtime.spec.config import EngineConfig
from runtime.spec.types import Request


class QueueLimits:
    """Those of one engine, and the times at which requests have finished since it was last idle."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler, held: HeldRequests) -> None:
        self._config, self._scheduler, self._held = config, scheduler, held
        self._sizes = scheduler.extras[QueueSizes]
        self._finish_times: deque[float] = deque(maxlen=64)
        self._deadlines: deque[tuple[float, RequestState]] = deque()  # of requests that may not have begun yet

    def finished(self, at: float) -> None:
        """A request has."""
        self._finish_times.append(at)

    def idle(self) -> None:
        """There is nothing to do."""
        self._finish_times.clear()

    def queued(self, state: RequestState, arrived_at: float) -> None:
        """A request is in the queue that has no token yet. One that was held for its adapter arrived before others."""
        if self._config.queue_timeout_s is not None:
            item = arrived_at + self._config.queue_timeout_s, state
            if self._deadlines and item[0] < self._deadlines[-1][0]:
                bisect.insort(self._deadlines, item, key=lambda item: item[0])
            else:
                self._deadlines.append(item)

    @property
    def has_deadlines(self) -> bool:
        """Something may be late."""
        return bool(self._deadlines) or self._held.has_deadlines

    def late(self) -> Iterator[Stream]:
        """Those that have waited for too long, each once. They came in the order of their deadlines; one that has begun
        or ended has none any more."""
        deadlines, now = self._deadlines, time.monotonic()
        while deadlines:
            due, state = deadlines[0]
            waits = state.num_cached is None and state.status is not RequestStatus.ENDED
            if waits and due > now:
                break
            deadlines.popleft()
            if waits:
                yield state.owner
        yield from self._held.late()

    def refusal(self, message: Submit) -> Refused | None:
        """The answer to a request for which there is no room; the queue is counted as it is now."""
        config, queue, held = self._config, self._scheduler.waiting, self._held
        waiting = len(queue) + len(held)
        tokens = queue.num_tokens + self._sizes.num_predicted + held.num_tokens
        num_bytes = self._sizes.num_bytes(queue.num_tokens) + held.num_bytes
        num_new = len(message.request.token_ids) + len(message.request.prediction)
        if waiting >= config.max_queued_requests:
            text = f"The engine has {waiting} requests waiting, its limit (max_queued_requests); try again later."
        elif waiting and tokens + num_new > config.max_queued_tokens:  # an empty queue takes any
            text = (
                f"The engine has {tokens} tokens waiting and this request has {num_new}, above "
                f"its limit of {config.max_queued_tokens} (max_queued_tokens); try again later."
            )
        elif waiting and num_bytes + (own := self._bytes_of(message.request)) > config.max_queued_bytes:
            text = (
                f"The engine has {num_bytes} bytes of requests waiting and this one has {own}, above its limit of "
                f"{config.max_queued_bytes} (max_queued_bytes); try again later."
            )
        else:
            return None
        return Refused(message.stream, text, Refusal.BUSY, self._retry_after_s(waiting))

    def _bytes_of(self, request: Request) -> int:
        """Bytes that a request would add to the queue, about."""
        grammar = request.params.grammar
        is_there = grammar is not None and self._sizes.has_grammar(grammar.key)
        return request.num_bytes - (grammar.num_bytes if grammar is not None and is_there else 0)

    def _retry_after_s(self, waiting: int) -> float:
        """How long the queue takes to drain at the rate of the last finished requests, within 1 to 60 seconds."""
        times = self._finish_times
        if len(times) < 2 or times[-1] == times[0]:
            return 1.0
        return min(60.0, max(1.0, waiting * (times[-1] - times[0]) / (len(times) - 1)))
