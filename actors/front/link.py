"""The front's side of one engine: a connection, its heartbeats, and the streams that the engine serves.

A link is usable from the engine's first Status on. It is lost when its connection ends, or when the engine answers no
heartbeat. Its group (`engine_group.py`) then moves the streams: a stream holds everything that another engine needs to
continue it (C8)."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol, cast

from msgspec.structs import replace as replace_fields

from actors.front.client_stream import ClientStream
from actors.ray.names import engine_id
from actors.wire.adapter_entry import AdapterEntry, AdapterState
from actors.wire.engine_client import EngineRefusal, Refusal, WeightsRefused
from actors.wire.link_messages import (
    HEARTBEAT_S,
    LOST_AFTER_BEATS,
    Abort,
    AbortById,
    Adapters,
    CacheUpdate,
    CancelPause,
    Done,
    EngineLoading,
    Follow,
    FromEngine,
    FromFront,
    FrontFigures,
    Heartbeat,
    Refused,
    ResetPrefixCache,
    SharedPrompts,
    Sleep,
    Status,
    Submit,
    Tokens,
    decode_from_engine,
    encode,
)
from actors.wire.metrics import MetricValues, Snapshot
from actors.wire.transport import Address, FrameCutter, connect_stream, head_of
from actors.wire.weight_calls import Pause
from runtime.background import in_background
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError, FinishReason
from runtime.features.keyed_store import KeyedSender

logger = logging.getLogger(__name__)

_RETRY_S = 0.1  # before another attempt to connect; doubles up to a second
_MAX_RETRY_S = 1.0
_CONNECT_S = 10.0  # limit for an attempt: a frozen engine does not answer Ray calls
_REPORT_S = 2.0  # limit for the answer to a report; after it, the last answer serves
_ANSWER_S = 10.0  # limit for the answer to a request, which waits for the current step


class LinkOwner(Protocol):
    """Receives what happens on its links."""

    ended_pauses: deque[str]  # ids

    def on_lost(self, link: EngineLink, streams: list[ClientStream]) -> None:
        """The connection ended. These streams need another engine."""
        ...

    def on_status(self, link: EngineLink, status: Status, is_first: bool) -> None:
        """The engine sent its state. `is_first`: the link is usable from now on."""
        ...

    def on_cache_update(self, link: EngineLink, update: CacheUpdate) -> None: ...

    def on_refused(self, link: EngineLink, stream: ClientStream, refused: Refused) -> None: ...


class _Connection(asyncio.Protocol):
    """A link's connection, until it is lost or cut."""

    def __init__(self, link: EngineLink) -> None:
        self._link: EngineLink | None = link
        self._cutter = FrameCutter()
        self.prompts, self.sender = SharedPrompts(), KeyedSender()
        self._has_received = False  # since the last heartbeat
        self._num_sent = self._num_written = self._backlog = 0  # bytes; the latter two at the last heartbeat
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop's class does not derive from it

    def send(self, frame: bytes) -> None:
        head = head_of(frame)
        self._num_sent += len(head) + len(frame)
        self.transport.writelines((head, frame))  # an image is not copied here

    def has_moved(self) -> bool:
        """True if the engine has sent anything since the last call, or has read from a full socket.

        On a slow network, images delay the heartbeats behind them."""
        backlog = self.transport.get_write_buffer_size()
        num_written = self._num_sent - backlog
        has_moved = self._has_received or (self._backlog > 0 and num_written > self._num_written)
        self._has_received, self._num_written, self._backlog = False, num_written, backlog
        return has_moved

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        for frame in self._cutter.cut(data):
            if self._link is not None:
                self._link.on_message(decode_from_engine(frame))

    def connection_lost(self, exc: Exception | None) -> None:
        self.cut()

    def cut(self) -> None:
        """End the connection now. Frames that still arrive are ignored."""
        link, self._link = self._link, None
        if link is not None:
            self.transport.abort()
            self.lost.set_result(None)
            link.on_connection_lost(self)


class EngineLink:
    """A connection to one engine, reopened when it breaks, and the streams that this engine serves."""

    def __init__(
        self, name: str, open_link: Callable[[], Awaitable[tuple[Address, ModelInfo]]], group: LinkOwner
    ) -> None:
        """`open_link()` requests an address and the model from the engine. It raises while the engine has none."""
        self.name, self.engine = name, engine_id(name)
        self._open_link, self._group = open_link, group
        self._streams: dict[int, ClientStream] = {}
        self._last_number = 0
        self._connection: _Connection | None = None
        self._reports: deque[asyncio.Future[None]] = deque()  # unanswered, in order
        self._pending: dict[int, asyncio.Future[Done]] = {}  # unanswered requests, by number
        self._must_reset_cache = False  # first, at the next connection
        self._snapshot: Snapshot | None = None
        self.info: ModelInfo
        self.reason: str | None = "The engine is starting."  # why it cannot serve; None if it is healthy
        self.usable = False  # connected, and a Status has arrived
        self.draining = self.is_asleep = False
        self.pause: Pause | None = None  # the current one
        self.adapters: dict[str, AdapterState] = {}  # adapters by name in the last Status
        self.digests: frozenset[str] = frozenset()  # digests of adapters that new requests may use
        self.kept: dict[str, str] = {}  # folders of adapters that resumed streams may use, by digest
        self.is_followed = False  # the engine sends CacheUpdates
        self.suspects: list[ClientStream] = []  # streams that the engine computed when its connection ended
        self._task = in_background(asyncio.create_task(self._keep_connected()), f"the link to engine {name}")

    def close(self) -> None:
        """Close the connection. The engine aborts the streams that still run."""
        self._task.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.transport.close()

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def num_streams(self) -> int:
        """The number of live streams on this link."""
        return len(self._streams)

    @property
    def streams(self) -> list[ClientStream]:
        return list(self._streams.values())

    # ---- for its group --------------------------------------------------------------------------------------------

    def submit(self, stream: ClientStream) -> None:
        """Submit a stream to this engine, with its received tokens."""
        stream.link, stream.number, stream.info, stream.in_queue = self, self._new_number(), self.info, False
        if (weights := self.info.weights) is not None:
            stream.note_weights(weights.name)
        stream.on_engine(self.engine)
        self._streams[stream.number] = stream
        if (connection := self._connection) is None:
            return
        request = stream.submission()
        message = Submit(stream.number, request.named, resumed=stream.accepted)
        try:
            frame = encode(connection.prompts.reduced(message))
            for each in [*connection.sender.frames(request.keyed.values()), frame]:
                connection.send(each)
            connection.prompts.sent(message)
        except Exception as e:  # a value that no message can hold
            connection.prompts.forget()
            del self._streams[stream.number]
            text = f"The request cannot be sent ({type(e).__name__}: {e}); check its values."
            stream.fail(EngineRefusal(text, Refusal.NEVER))

    def drop(self, stream: ClientStream) -> bool:
        """Abort a stream on this engine. Returns False if it has already ended."""
        if self._streams.pop(stream.number, None) is None:
            return False
        self._send(Abort(stream.number))
        return True

    def abort(self, request_id: str) -> None:
        """End a request of any front on this engine."""
        self._send(AbortById(request_id))

    def follow(self, wanted: bool) -> None:
        """Subscribe to this engine's CacheUpdates, beginning with a snapshot, or unsubscribe."""
        self.is_followed = wanted
        self._send(Follow(wanted))

    async def reset_prefix_cache(self) -> None:
        """Evict this engine's blocks that no live request holds. Raises CallboardError without an answer in time.

        A disconnected engine gets the request as the first one at its next connection."""
        if self._connection is None:
            self._must_reset_cache = True
            return
        asked = self._reset_cache()
        await asyncio.wait((asked,), timeout=_ANSWER_S)
        if not asked.done():
            text = f"Engine {self.engine} has not confirmed within {_ANSWER_S:g} s that its prefix cache is empty"
            raise CallboardError(f"{text}; try again.")

    def _reset_cache(self) -> asyncio.Future[Done]:
        return self._request(ResetPrefixCache(self._new_number()))

    async def sleep(self, level: int) -> None:
        """Put this engine to sleep at a level, or wake it (0). Raises CallboardError if it fails."""
        asked = self._request(Sleep(self._new_number(), level))
        await asyncio.wait((asked,))
        if error := "it was lost meanwhile." if asked.cancelled() else asked.result().error:
            raise CallboardError(f"Engine {self.engine} does not {'sleep' if level else 'wake up'}: {error}")

    async def pause_for(self, pause: Pause) -> None:
        """Pause this engine. Raises WeightsRefused."""
        asked = self.send_pause(pause)
        await asyncio.wait((asked,))
        if asked.cancelled():
            raise WeightsRefused(f"Engine {self.engine} was lost during the pause; try again.", "unavailable")
        if (done := asked.result()).error:
            raise WeightsRefused(done.error, done.code)

    def send_pause(self, pause: Pause) -> asyncio.Future[Done]:
        return self._request(replace_fields(pause, number=self._new_number()))

    def cancel_pause(self, pause_id: str) -> None:
        """Undo a pause of this engine. Another pause is not affected."""
        self._send(CancelPause(pause_id))

    def _request(self, message: ResetPrefixCache | Sleep | Pause) -> asyncio.Future[Done]:
        asked = self._pending[message.number] = asyncio.get_running_loop().create_future()
        self._send(message)
        return asked

    def _new_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def send_adapters(self, entries: list[AdapterEntry], needs: dict[str, str] | None) -> None:
        """Send this engine new name entries, and the adapters of this front's streams (None if unchanged)."""
        self._send(Adapters(entries, needs))

    def has_adapter(self, stream: ClientStream) -> bool:
        """True if this engine has a stream's adapter, and the stream may use it."""
        adapter = stream.request.adapter
        return not adapter or adapter in self.digests or (stream.accepted and adapter in self.kept)

    async def report(self, figures: MetricValues) -> Snapshot | None:
        """Send the engine the counts of this front; return all its figures, or its last answer if it is slow.

        Returns None without a connection. `figures` are then lost."""
        if self._connection is None:
            return None
        asked = asyncio.get_running_loop().create_future()
        self._reports.append(asked)
        self._send(FrontFigures(figures))
        await asyncio.wait((asked,), timeout=_REPORT_S)
        return self._snapshot

    def _send(self, message: FromFront | Heartbeat | FrontFigures) -> None:
        if self._connection is not None:  # else its streams have already left
            self._connection.send(encode(message))

    # ---- the connection -------------------------------------------------------------------------------------------

    async def _connect(self) -> _Connection:
        address, self.info = await self._open_link()
        return await connect_stream(address, lambda: _Connection(self))

    async def _keep_connected(self) -> None:
        last_error, pause = "", _RETRY_S
        while True:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    connection = await self._connect()
            except EngineLoading as e:  # this call has waited, and so does the next one
                self.reason, pause = str(e), _RETRY_S
                continue
            except Exception as e:  # any failure may pass: the engine is starting
                if last_error != (last_error := f"{type(e).__name__}: {e}"):
                    logger.warning("no link to engine %s yet: %s", self.name, last_error)
            else:
                last_error = ""
                if not connection.lost.done():
                    self._connection = connection
                    if self._must_reset_cache:
                        self._must_reset_cache = False
                        self._reset_cache()
                    await self._watch(connection)
                    pause = _RETRY_S
            await asyncio.sleep(pause)  # an engine that closes connections at once is not retried in a tight loop
            pause = min(2 * pause, _MAX_RETRY_S)

    async def _watch(self, connection: _Connection) -> None:
        """Send heartbeats until the connection is lost. It is cut after LOST_AFTER_BEATS without an answer.

        Beats count, not seconds: if this process itself is late, only one beat counts."""
        num_silent = 0
        while not connection.lost.done():
            num_silent = 0 if connection.has_moved() else num_silent + 1
            if num_silent >= LOST_AFTER_BEATS:
                logger.warning("engine %s has answered none of %d heartbeats", self.name, LOST_AFTER_BEATS)
                connection.cut()
                return
            self._send(Heartbeat())
            await asyncio.wait((connection.lost,), timeout=HEARTBEAT_S)

    def on_connection_lost(self, connection: _Connection) -> None:
        """Hand the streams to the group. The link then reconnects to its engine."""
        if connection is not self._connection:
            return  # closed, or ended before its use
        self._connection, self.usable, self.is_followed = None, False, False
        self.draining, self.is_asleep, self.pause = False, False, None
        self.reason = "The engine is restarting."
        self._must_reset_cache = self._must_reset_cache or bool(self._pending)
        for report in self._reports:
            report.cancel()
        for asked in self._pending.values():
            asked.cancel()
        self._reports.clear()
        self._pending.clear()
        self._snapshot = None
        streams, self._streams = self._streams, {}
        self.suspects = [stream for stream in streams.values() if not stream.in_queue]
        logger.warning("lost engine %s with %d streams", self.name, len(streams))
        self._group.on_lost(self, list(streams.values()))

    # ---- messages of the engine -----------------------------------------------------------------------------------

    def on_message(self, message: FromEngine) -> None:
        if isinstance(message, Tokens):
            self._on_tokens(message)
        elif isinstance(message, CacheUpdate):
            self._group.on_cache_update(self, message)
        elif isinstance(message, Status):
            self.reason, self.draining, self.is_asleep = message.reason, message.draining, message.is_asleep
            if self.pause is not None and message.pause is None:
                self._group.ended_pauses.append(self.pause.pause_id)
            self.pause = message.pause
            adapters = self.adapters if self.usable else {}
            self.adapters = adapters | {state.entry.name: state for state in message.adapters}
            for name in message.dropped:
                self.adapters.pop(name, None)
            self.digests = frozenset[str]().union(*(state.digests for state in self.adapters.values()))
            self.kept, is_first = message.kept, not self.usable
            self._use_weights(message)
            self.usable, self.suspects = True, []  # the engine lives, so no stream has killed it
            self._group.on_status(self, message, is_first)
        elif isinstance(message, Snapshot):
            self._snapshot = message
            if not (asked := self._reports.popleft()).done():
                asked.set_result(None)
        elif isinstance(message, Done):
            self._pending.pop(message.number).set_result(message)
        elif isinstance(message, Refused) and (stream := self._streams.pop(message.stream, None)) is not None:
            self._group.on_refused(self, stream, message)

    def _use_weights(self, status: Status) -> None:
        """Later frames have tokens of these weights: the engine has sent all others before."""
        if status.fingerprint in ("", self.info.fingerprint) and status.weights == self.info.weights:
            return
        self.info = replace(self.info, fingerprint=status.fingerprint, weights=status.weights)
        for stream in self._streams.values():
            stream.info = self.info
            if status.weights is not None:
                stream.note_weights(status.weights.name)

    def _on_tokens(self, frame: Tokens) -> None:
        streams = self._streams
        sampled_at = frame.sampled_at
        for number, has_slot in frame.accepted:
            if (stream := streams.get(number)) is not None:
                stream.accepted, stream.in_queue = True, not has_slot
                stream.refusals.clear()
        for number, num_cached, queued_s, prefill_s in frame.started:
            if (stream := streams.get(number)) is not None and not stream.received:
                output = stream.output()
                output.num_cached, output.queued_s, output.prefill_s = num_cached, queued_s, prefill_s
                output.first_sampled_at = sampled_at
                output.num_expected = stream.num_expected
        for number, report in frame.reports:
            if (stream := streams.get(number)) is not None:
                stream.take_report(report, sampled_at)
        columns = zip(memoryview(frame.streams).cast("i"), memoryview(frame.token_ids).cast("i"), strict=True)
        for i, (number, token) in enumerate(columns):
            if (stream := streams.get(number)) is None:
                continue  # aborted or moved, which the engine has not received yet
            stream.received.append(token)
            output = stream.output()
            output.token_ids.append(token)
            output.sampled_at = sampled_at
            if i in frame.logprobs:
                output.logprobs.append(frame.logprobs[i])
            stream.wake()
        for ended in frame.ended:
            if (stream := streams.pop(ended.stream, None)) is not None:
                stream.output().stop_token_id = ended.stop_token_id
                stream.end(FinishReason(ended.reason), ended.error)
