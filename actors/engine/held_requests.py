"""Requests that wait until their adapter is loaded. They count in the queue's limits and time out as queued ones."""

from __future__ import annotations

import time
from collections.abc import Iterator

from actors.engine.link_server import Stream
from runtime.spec.types import Request


class HeldRequests:
    """The held requests of one engine, in the order of their arrival."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._requests: dict[Stream, tuple[Request, bool]] = {}
        self._deadlines: dict[Stream, float] = {}  # of requests that may be held no more
        self.num_tokens = self.num_bytes = 0  # of prompts and predictions; of all that they hold

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, stream: Stream, request: Request, resumed: bool) -> None:
        if self._timeout_s is not None and not resumed:
            self._deadlines[stream] = stream.arrived_at + self._timeout_s  # one that is held again keeps its place
        self._requests[stream] = request, resumed
        self._count(request, 1)

    def remove(self, stream: Stream) -> None:
        """The stream has ended; one that is not held is no error."""
        if (found := self._requests.pop(stream, None)) is not None:
            self._count(found[0], -1)

    def _count(self, request: Request, times: int) -> None:
        self.num_tokens += times * (len(request.token_ids) + len(request.prediction))
        self.num_bytes += times * request.num_bytes

    def take(self) -> list[tuple[Stream, Request, bool]]:
        """All of them, which are held no more: stream, request, and whether it is resumed."""
        taken = [(stream, *found) for stream, found in self._requests.items()]
        self._requests.clear()
        self.num_tokens = self.num_bytes = 0
        return taken

    @property
    def has_deadlines(self) -> bool:
        """True if `late` may return something later."""
        return bool(self._deadlines)

    def late(self) -> Iterator[Stream]:
        """The streams that were held for too long, each once."""
        while self._deadlines:
            stream, due = next(iter(self._deadlines.items()))
            is_held = stream in self._requests
            if is_held and due > time.monotonic():
                return
            del self._deadlines[stream]
            if is_held:
                yield stream
