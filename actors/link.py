"""The replica's side of an engine: submit requests, receive every new token, resume after an engine's death.

The link keeps, for each live request, what it has received of it. When the connection breaks it finds the engine again
(the same one, or the one that the supervisor put in its place) and resubmits prompt and received tokens with the same
seed; the engine continues where the stream stopped, so no token is lost, repeated or changed (C8).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from actors.frames import (
    HEARTBEAT_S,
    PREFIX,
    Abort,
    AbortById,
    EngineLoading,
    Heartbeat,
    LinkAddress,
    Refusal,
    Refused,
    Report,
    Status,
    Submit,
    Tokens,
    decode_from_engine,
    encode,
    frame_size,
    tune_tcp,
)
from actors.metrics import Figures, Snapshot
from runtime.core.config import ModelInfo
from runtime.core.types import CallboardError, FinishReason, Request, RequestOutput, Verified

logger = logging.getLogger(__name__)

_RETRY_S = 0.1  # between attempts to find the engine again
_REPORT_S = 2.0  # an engine that does not answer a report within this is told of by its last answer


class EngineBusy(CallboardError):
    """The engine's queue is full; come back after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDraining(CallboardError):
    """The engine takes no new requests, because it is about to end."""


class QueueTimeout(CallboardError):
    """The request waited in the queue for as long as it may; it was not begun."""


class EngineClient(Protocol):
    """What a front end needs of an engine, however far away it is."""

    info: ModelInfo

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        """Yields what is new until an output has a finish reason; closing the generator aborts the request.

        Outputs that piled up while the consumer was busy arrive merged into one.
        Raises EngineBusy if the queue is full, EngineDraining, QueueTimeout, and CallboardError if the request cannot
        be served.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a request by its id or its client's id for it, whoever submitted it; an unknown one is no error."""
        ...

    async def report(self, figures: dict[int, Figures]) -> dict[int, Snapshot]:
        """Give each engine what was counted for its requests since the last report; the figures of all engines that
        answered. One that did not has not got its part."""
        ...

    def health(self) -> str:
        """Empty if requests can be served now; else one sentence that says why not."""
        ...


class _Stream:
    """One live request: what it has received in all, and what its reader has not taken yet."""

    __slots__ = ("_waiter", "error", "pending", "received", "request", "scored")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.received = array("i")
        self.scored = False  # it has its prompt's log-probabilities
        self.pending: RequestOutput | None = None
        self.error: CallboardError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def output(self) -> RequestOutput:
        """The output to add to: a fresh one, or the one that still waits to be taken."""
        if self.pending is None:
            self.pending = RequestOutput(self.request.request_id, [])
        return self.pending

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> RequestOutput:
        """All that has piled up; waits for something if nothing has."""
        while self.pending is None:
            if self.error is not None:
                raise self.error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self.pending = self.pending, None
        return output

    def resubmission(self) -> Request:
        """The request as a new engine must see it."""
        params = replace(self.request.params, prompt_logprobs=None) if self.scored else self.request.params
        return replace(self.request, token_ids=[*self.request.token_ids, *self.received], params=params)


class _Connection(asyncio.Protocol):
    """Cuts the byte stream into frames."""

    def __init__(self, on_message: Callable[[Tokens | Refused | Status | Snapshot], None]) -> None:
        self._on_message = on_message
        self._data = bytearray()
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._data += data
        buffer, at = self._data, 0
        while len(buffer) - at >= PREFIX.size:
            end = at + PREFIX.size + frame_size(buffer[at : at + PREFIX.size])
            if len(buffer) < end:
                break
            self._on_message(decode_from_engine(bytes(buffer[at + PREFIX.size : end])))
            at = end
        del buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)


class EngineLink:
    """An EngineClient over one socket to one engine at a time.

    `find()` asks the engine, wherever it runs now, for an address to connect to and for its model; it raises while
    there is none."""

    def __init__(self, find: Callable[[], Awaitable[tuple[LinkAddress, ModelInfo]]]) -> None:
        self._find = find
        self._streams: dict[int, _Stream] = {}
        self._last_number = 0
        self._seen = 0
        self._reason = "The engine is starting."
        self._transport: asyncio.WriteTransport | None = None
        self._reports: deque[asyncio.Future[None]] = deque()  # not answered yet
        self._snapshot: Snapshot | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.info: ModelInfo

    async def start(self) -> None:
        """Returns when there is an engine and the link is connected to it."""
        self._connected = asyncio.Event()
        self._tasks = [asyncio.create_task(self._keep_connected()), asyncio.create_task(self._beat())]
        await self._connected.wait()

    def close(self) -> None:
        """Let the engine go; it aborts what is still running."""
        for task in self._tasks:
            task.cancel()
        if self._transport is not None:
            self._transport.close()

    @property
    def num_streams(self) -> int:
        """Live requests of this link."""
        return len(self._streams)

    def health(self) -> str:
        return self._reason

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        self._last_number += 1
        number, stream = self._last_number, _Stream(request)
        self._streams[number] = stream
        self._send(Submit(number, request, resumed=False))
        try:
            while True:
                output = await stream.take()
                yield output
                if output.finish_reason:
                    return
        finally:
            if self._streams.pop(number, None) is not None:
                self._send(Abort(number))

    def abort(self, request_id: str) -> None:
        self._send(AbortById(request_id))

    async def report(self, figures: Figures) -> Snapshot | None:
        """Give the engine what was counted, and get all that it knows: its last answer if it is slow, None if there is
        no engine, which then has not got `figures`."""
        if self._transport is None:
            return None
        asked = asyncio.get_running_loop().create_future()
        self._reports.append(asked)
        self._send(Report(figures))
        await asyncio.wait((asked,), timeout=_REPORT_S)
        return self._snapshot

    def _send(self, message: Submit | Abort | AbortById | Heartbeat | Report) -> None:
        if self._transport is not None:  # else it is resubmitted when there is an engine again
            self._transport.write(encode(message))

    async def _connect(self) -> asyncio.Future[None]:
        address, self.info = await self._find()
        loop = asyncio.get_running_loop()
        make = lambda: _Connection(self._on_message)  # noqa: E731
        if address.path:
            sock = socket.socket(socket.AF_UNIX)
            sock.setblocking(False)
            sock.connect(address.path)  # local and at once; uvloop does not take an abstract name
            transport, connection = await loop.create_unix_connection(make, sock=sock)
        else:
            transport, connection = await loop.create_connection(make, address.host, address.port)
            tune_tcp(transport.get_extra_info("socket"))
        transport.write(PREFIX.pack(len(address.secret)) + address.secret)
        self._seen = 0
        self._transport = transport
        for number, stream in self._streams.items():
            self._send(Submit(number, stream.resubmission(), resumed=True))
        self._reason = ""
        return connection.lost

    async def _keep_connected(self) -> None:
        said = ""
        while True:
            try:
                lost = await self._connect()
            except EngineLoading as e:
                self._reason = str(e)
                await asyncio.sleep(_RETRY_S)
                continue
            except Exception as e:  # whatever keeps us from the engine now may pass: it is being started
                if said != (said := f"{type(e).__name__}: {e}"):
                    logger.warning("no engine yet: %s", said)
                await asyncio.sleep(_RETRY_S)
                continue
            said = ""
            self._connected.set()
            await lost
            self._transport = None
            self._reason = "The engine is restarting."
            for asked in self._reports:
                asked.cancel()
            self._reports.clear()
            self._snapshot = None
            logger.warning("lost the engine with %d streams; looking for it again", len(self._streams))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._streams:
                self._send(Heartbeat(self._seen))

    def _on_message(self, message: Tokens | Refused | Status | Snapshot) -> None:
        if isinstance(message, Tokens):
            self._on_tokens(message)
        elif isinstance(message, Status):
            self._reason = message.reason
        elif isinstance(message, Snapshot):
            self._snapshot = message
            if not (asked := self._reports.popleft()).done():
                asked.set_result(None)
        elif (stream := self._streams.pop(message.stream, None)) is not None:
            match message.reason:
                case Refusal.BUSY:
                    stream.error = EngineBusy(message.message, message.retry_after_s)
                case Refusal.DRAINING:
                    stream.error = EngineDraining(message.message)
                case Refusal.LATE:
                    stream.error = QueueTimeout(message.message)
                case Refusal.NEVER:
                    stream.error = CallboardError(message.message)
            stream.wake()

    def _on_tokens(self, frame: Tokens) -> None:
        self._seen = frame.number
        streams = self._streams
        sampled_at = frame.sampled_at
        for number, num_cached, queued_s, prefill_s in frame.started:
            if (stream := streams.get(number)) is not None and not stream.received:
                output = stream.output()
                output.num_cached, output.queued_s, output.prefill_s = num_cached, queued_s, prefill_s
        for number, num_guessed, num_accepted in frame.verified:
            if (stream := streams.get(number)) is not None:
                output = stream.output()
                output.verified = output.verified or []
                output.verified.append(Verified(len(output.token_ids), num_guessed, num_accepted))
        columns = zip(memoryview(frame.streams).cast("i"), memoryview(frame.token_ids).cast("i"), strict=True)
        for i, (number, token) in enumerate(columns):
            if (stream := streams.get(number)) is None:
                continue  # aborted; the engine does not know it yet
            stream.received.append(token)
            output = stream.output()
            output.token_ids.append(token)
            output.sampled_at = sampled_at
            if i in frame.logprobs:
                output.logprobs.append(frame.logprobs[i])
            stream.wake()
        for number, scores in frame.prompt_logprobs:
            if (stream := streams.get(number)) is not None:
                stream.scored = True
                request = stream.request
                stream.output().prompt_logprobs = scores.of(request.token_ids[1 : request.prompt_len])
                stream.wake()
        for ended in frame.ended:
            if (stream := streams.pop(ended.stream, None)) is not None:
                output = stream.output()
                output.finish_reason = FinishReason(ended.reason)
                output.stop_token_id, output.error = ended.stop_token_id, ended.error
                stream.wake()


class LinkGroup:
    """An EngineClient over several engines of the same model: each request goes to the healthy one with least load."""

    def __init__(self, links: list[EngineLink]) -> None:
        self._links = links

    async def start(self) -> None:
        """Connect to all engines; returns when there is one. The others are used as soon as they are there."""
        self._starts = [asyncio.create_task(link.start()) for link in self._links]
        await asyncio.wait(self._starts, return_when=asyncio.FIRST_COMPLETED)
        self.info = next(link.info for link, start in zip(self._links, self._starts, strict=True) if start.done())

    def close(self) -> None:
        """Let all engines go."""
        for start in self._starts:
            start.cancel()
        for link in self._links:
            link.close()

    def health(self) -> str:
        reasons = [link.health() for link in self._links]
        return "" if "" in reasons else reasons[0]

    def generate(self, request: Request) -> AsyncGenerator[RequestOutput, None]:
        links = self._links
        request.engine = min(range(len(links)), key=lambda i: (bool(links[i].health()), links[i].num_streams))
        return links[request.engine].generate(request)

    async def report(self, figures: dict[int, Figures]) -> dict[int, Snapshot]:
        reports = [link.report(figures.get(i, Figures())) for i, link in enumerate(self._links)]
        return {i: snapshot for i, snapshot in enumerate(await asyncio.gather(*reports)) if snapshot is not None}

    def abort(self, request_id: str) -> None:
        for link in self._links:
            link.abort(request_id)
