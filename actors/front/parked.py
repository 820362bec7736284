"""Streams that wait at a front: for an engine, or for one with the weights that they name.

Each has a deadline. They keep the limits of an engine's queue, and one API key leaves places to the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from actors.front.client_stream import ClientStream
from actors.wire.engine_client import EngineRefusal, Refusal
from actors.wire.link_messages import WaitLimits, owner_of
from actors.wire.metrics import MetricValues
from runtime.base.types import Request
from runtime.policy.queue_sizes import KeyedBytes, RequestSizes, exceeds_share

_RETRY_S = 1.0  # retry delay for clients that the limits refuse


class ParkedStreams:
    """One front's parked streams, in order of arrival."""

    def __init__(self, limits: WaitLimits | None, expire: Callable[[ClientStream, str], None]) -> None:
        """`limits` are this front's own; None if it uses the engines'. `expire` fails a late stream, for a reason."""
        self._own_limits, self._limits, self._expire = limits, limits, expire
        self._streams: dict[ClientStream, tuple[float, asyncio.TimerHandle | None]] = {}  # since when; its deadline
        self._sizes = RequestSizes(KeyedBytes())  # without streams that an engine has accepted
        self.figures = MetricValues()  # unreported ones

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[ClientStream]:
        return iter(list(self._streams))

    def note_limits(self, limits: WaitLimits) -> None:
        """Use the limits of an engine."""
        own = self._own_limits
        self._limits = limits if own is None else replace(own, trainer_timeout_s=limits.trainer_timeout_s)

    def add(self, stream: ClientStream) -> None:
        """Park a stream. Raises EngineRefusal at a limit; a stream that an engine has accepted has none."""
        if not stream.accepted and (text := self._fault(stream.request)):
            raise EngineRefusal(f"{text}; try again later.", Refusal.BUSY, _RETRY_S)
        timer, (seconds, reason) = None, self._time_limit(stream)
        if seconds is not None:
            timer = asyncio.get_running_loop().call_later(seconds, self._expire, stream, reason)
        self._streams[stream] = time.monotonic(), timer
        if not stream.accepted:
            self._sizes.add(stream.request, 1)
        self.figures.count("callboard:engine_waits")

    def remove(self, stream: ClientStream) -> bool:
        """Returns False if the stream is not parked."""
        if (found := self._streams.pop(stream, None)) is None:
            return False
        if not stream.accepted:
            self._sizes.add(stream.request, -1)
        since, timer = found
        if timer is not None:
            timer.cancel()
        self.figures.histogram("callboard:engine_wait_seconds").observe(time.monotonic() - since)
        return True

    def _fault(self, request: Request) -> str:
        """Return the limit that a further request exceeds; empty if it fits."""
        if (limits := self._limits) is None:
            return ""
        waiting = [stream.request for stream in self._streams if not stream.accepted]
        owner, most = owner_of(request.request_id), limits.max_requests
        if len(waiting) >= most:
            return f"{len(waiting)} requests wait for an engine, the limit (max_queued_requests)"
        own = sum(owner_of(other.request_id) == owner for other in waiting)
        if owner and exceeds_share(own, len(waiting), most):
            return f"{own} requests of your API key wait for an engine, its share of {most} (max_queued_requests)"
        sizes, keyed = self._sizes, self._sizes.keyed
        for what, size, num_new, limit, name in (
            ("tokens", sizes.num_tokens, request.num_tokens, limits.max_tokens, "max_queued_tokens"),
            ("bytes", sizes.own_bytes + keyed.total, keyed.added_by(request), limits.max_bytes, "max_queued_bytes"),
        ):
            if waiting and size + num_new > limit:
                fault = f"{size} {what} wait for an engine and this request has {num_new}"
                return f"{fault}, above the limit of {limit} ({name})"
        return ""

    def _time_limit(self, stream: ClientStream) -> tuple[float | None, str]:
        """Return the longest wait of a stream, None if unlimited, and why it ends then."""
        limits, wanted = self._limits, stream.request.min_weight_version
        if limits is None or (stream.accepted and not wanted):
            return None, ""
        name, seconds = "queue_timeout_s", limits.timeout_s
        if limits.trainer_timeout_s is not None and (seconds is None or limits.trainer_timeout_s < seconds):
            name, seconds = "trainer_timeout_s", limits.trainer_timeout_s
        what = f"and no engine got weights of the version {wanted!r}" if wanted else "while there was no engine"
        return seconds, f"The request waited longer than {name} {what}."
