"""The limits of an engine's queue, its deadlines, and the requests that wait for an adapter."""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Iterable, Iterator

from actors.engine.link_server import EngineStream
from actors.wire.engine_client import Refusal
from actors.wire.link_messages import Refused, Submit, owner_of
from runtime.base.config import EngineConfig
from runtime.base.types import Request
from runtime.core.request_state import RequestState, RequestStatus
from runtime.core.scheduler import Scheduler
from runtime.policy.queue_sizes import KeyedBytes, QueueSizes, RequestSizes, exceeds_share

_LEAST_TIMES = 4  # request ends that make a rate: a single interval may be any


class HeldRequests:
    """The requests that wait until their adapter is loaded, in the order of arrival.

    They count in the queue's limits, and time out like queued ones."""

    def __init__(self, timeout_s: float | None, keyed: KeyedBytes) -> None:
        """`keyed` counts the grammars and images of queued requests, too."""
        self._timeout_s, self.sizes = timeout_s, RequestSizes(keyed)
        self._requests: dict[EngineStream, tuple[Request, bool]] = {}
        self._deadlines: dict[EngineStream, float] = {}  # may include ended streams

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def streams(self) -> Iterable[EngineStream]:
        return self._requests

    def add(self, stream: EngineStream, request: Request, resumed: bool) -> None:
        if self._timeout_s is not None and not resumed:
            # A request that is held again keeps its deadline.
            self._deadlines[stream] = stream.arrived_at + self._timeout_s
        self._requests[stream] = request, resumed
        self.sizes.add(request, 1)

    def remove(self, stream: EngineStream) -> None:
        """Remove an ended stream. Other streams are ignored."""
        if (found := self._requests.pop(stream, None)) is not None:
            self.sizes.add(found[0], -1)

    def take(self) -> list[tuple[EngineStream, Request, bool]]:
        """Remove and return all: stream, request, and whether it is resumed."""
        taken = [(stream, *found) for stream, found in self._requests.items()]
        for stream, _, _ in taken:
            self.remove(stream)
        return taken

    @property
    def has_deadlines(self) -> bool:
        """True if a later call of `late` may return a stream."""
        return bool(self._deadlines)

    def late(self) -> Iterator[EngineStream]:
        """Yield the streams that were held for too long, each once."""
        while self._deadlines:
            stream, due = next(iter(self._deadlines.items()))
            is_held = stream in self._requests
            if is_held and due > time.monotonic():
                return
            del self._deadlines[stream]
            if is_held:
                yield stream


class QueueLimits:
    """The limits of one engine's queue, and the rate at which its requests finish."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler, held: HeldRequests) -> None:
        self._config, self._requests, self._held = config, scheduler.requests, held
        self._waiting = scheduler.waiting
        self._sizes = scheduler.extras[QueueSizes]
        self._finish_times: deque[float] = deque(maxlen=64)  # times since the engine was idle
        self._deadlines: deque[tuple[float, RequestState]] = deque()  # ordered; some requests may have begun or ended

    def finished(self, at: float) -> None:
        """Note the end of a request."""
        self._finish_times.append(at)

    def idle(self) -> None:
        """Note that the engine is idle: its rate is then unknown."""
        self._finish_times.clear()

    def queued(self, state: RequestState, arrived_at: float) -> None:
        """Note the deadline of a queued request without tokens. A request that was held may precede others."""
        if self._config.queue_timeout_s is not None:
            item = arrived_at + self._config.queue_timeout_s, state
            if self._deadlines and item[0] < self._deadlines[-1][0]:
                bisect.insort(self._deadlines, item, key=lambda item: item[0])
            else:
                self._deadlines.append(item)

    @property
    def has_deadlines(self) -> bool:
        """True if a request may become late."""
        return bool(self._deadlines) or self._held.has_deadlines

    def late(self) -> Iterator[EngineStream]:
        """Yield the streams that have waited for too long, each once.

        The deadlines are in order. The deadline of a request that has begun or ended is void."""
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
        """Return the refusal of a request that does not fit the queue; None if it fits."""
        config, held, sizes, num_new = self._config, self._held, self._sizes, message.request.num_tokens
        waiting = len(self._waiting) + len(held)
        tokens = self._waiting.num_tokens + sizes.num_predicted + held.sizes.num_tokens
        num_bytes = sizes.num_bytes(self._waiting.num_tokens) + held.sizes.own_bytes
        if waiting >= config.max_queued_requests:
            text = f"The engine has {waiting} requests waiting, its limit (max_queued_requests); try again later."
        elif text := self._fault_of_share(owner_of(message.request.request_id), waiting):
            pass
        elif waiting and tokens + num_new > config.max_queued_tokens:  # an empty queue takes any request
            text = (
                f"The engine has {tokens} tokens waiting and this request has {num_new}, above "
                f"its limit of {config.max_queued_tokens} (max_queued_tokens); try again later."
            )
        elif waiting and num_bytes + (own := sizes.keyed.added_by(message.request)) > config.max_queued_bytes:
            text = (
                f"The engine has {num_bytes} bytes of requests waiting and this one has {own}, above its limit of "
                f"{config.max_queued_bytes} (max_queued_bytes); try again later."
            )
        else:
            return None
        return Refused(message.stream, text, Refusal.BUSY, self._retry_after_s(waiting))

    def _fault_of_share(self, owner: str, waiting: int) -> str:
        """Return why an owner may not queue another request; empty if it may."""
        most = self._config.max_queued_requests
        if not owner or not exceeds_share(waiting, waiting, most):  # even if all are its own
            return ""
        queued = (state.owner for state in self._requests.values() if state.status is RequestStatus.WAITING)
        streams = [*queued, *self._held.streams]
        own = sum(owner_of(stream.request_id) == owner for stream in streams)
        if not exceeds_share(own, waiting, most):
            return ""
        return f"Your API key has {own} requests waiting, its share of {most} (max_queued_requests); try again later."

    def _retry_after_s(self, waiting: int) -> float:
        """Return the seconds until the queue drains at the current rate, within 1 to 60."""
        times = self._finish_times
        if len(times) < _LEAST_TIMES or times[-1] == times[0]:
            return 1.0
        return min(60.0, max(1.0, waiting * (times[-1] - times[0]) / (len(times) - 1)))
