"""The front's side of one engine: a connection, its heartbeats, and the streams that the engine serves.

A link is healthy from the engine's first Status on, and lost when its connection ends or the engine answers no
heartbeat. What becomes of a lost link's streams is up to its group (`engine_group.py`): a stream holds all that another
engine needs to continue it (C8).
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from actors.front.router import Prompt
from actors.ray.names import engine_id
from actors.wire.adapter_entry import AdapterEntry, AdapterState
from actors.wire.engine_client import EngineRefusal, OnEngine
from actors.wire.messages import (
    HEARTBEAT_S,
    LOST_AFTER_BEATS,
    Abort,
    AbortById,
    Adapters,
    CacheUpdate,
    Done,
    EngineLoading,
    Follow,
    Forget,
    FromEngine,
    FromFront,
    Heartbeat,
    Refused,
    Report,
    SharedPrompts,
    Sleep,
    Status,
    Submit,
    Tokens,
    decode_from_engine,
    encode,
)
from actors.wire.metrics import MetricValues, Snapshot
from actors.wire.transport import Address, FrameCutter, connect_stream, framed
from runtime.features.grammar_store import GrammarSender, request_by_key
from runtime.spec.config import ModelInfo
from runtime.spec.types import CallboardError, FinishReason, GrammarUpdate, Request, RequestOutput, Verified

if TYPE_CHECKING:
    from actors.front.engine_group import EngineGroup

logger = logging.getLogger(__name__)

_RETRY_S = 0.1  # before another attempt to connect; each time twice as long, up to a second
_MAX_RETRY_S = 1.0
_CONNECT_S = 10.0  # an attempt may take so long: a frozen engine answers no Ray call
_REPORT_S = 2.0  # an engine that does not answer a report within this is told of by its last answer
_ANSWER_S = 10.0  # an engine may take so long until it has done what it is asked for: its step may be a long one


@dataclass(slots=True, eq=False)
class Stream:
    """One live request: what it has received in all, what its reader has not taken yet, and where it is served."""

    request: Request
    on_engine: OnEngine
    received: array[int] = field(default_factory=lambda: array("i"))
    scored: bool = False  # it has its prompt's log-probabilities
    pending: RequestOutput | None = None
    error: CallboardError | None = None
    link: EngineLink | None = None  # where it is served; None: nowhere yet, or not any more
    number: int = 0  # on that link
    info: ModelInfo | None = None  # of the last engine that it was given to
    accepted: bool = False  # an engine has taken it: it skips the queue limits of the next one
    waits: bool = False  # it is in the queue of its engine, as far as is known, and was never in a step
    prompt: Prompt | None = None  # its tokens as caches know them; None: no choice has asked yet
    num_expected: int | None = None  # of its tokens, those that its engine should have cached; None: no choice was made
    num_losses: int = 0  # engines that died while they computed it
    spared_at: int | None = None  # tokens that it had when it left an engine that had lost its runners
    refusals: dict[EngineLink, EngineRefusal] = field(default_factory=dict)  # by those that did not take it
    _waiter: asyncio.Future[None] | None = None

    def output(self) -> RequestOutput:
        """The output to add to: a fresh one, or the one that still waits to be taken."""
        if self.pending is None:
            self.pending = RequestOutput(self.request.request_id, [])
        return self.pending

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: CallboardError) -> None:
        """Its reader gets what has piled up, then `error`."""
        self.error = error
        self.wake()

    def end(self, reason: FinishReason, error: str = "") -> None:
        """Its reader gets what has piled up, with this end."""
        output = self.output()
        output.finish_reason, output.error = reason, error
        self.wake()

    async def take(self) -> RequestOutput:
        """All that has piled up; waits for something if nothing has."""
        while self.pending is None:
            if self.error is not None:
                raise self.error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self.pending = self.pending, None
        return output

    def submission(self) -> Request:
        """The request as its next engine must see it."""
        if not self.received and not self.scored:
            return self.request
        params = replace(self.request.params, prompt_logprobs=None) if self.scored else self.request.params
        return replace(self.request, token_ids=[*self.request.token_ids, *self.received], params=params)

    def suits(self, info: ModelInfo) -> bool:
        """An engine with this model goes on as the last one would have: with equal numbers, and to the same end."""
        last = self.info
        if last is not None and self.received and last.fingerprint != info.fingerprint:
            return False
        limit = self.request.prompt_len + self.request.params.max_tokens
        return (limit if last is None else min(limit, last.max_model_len)) <= info.max_model_len


class _Connection(asyncio.Protocol):
    """A link's connection, until it is lost or cut."""

    def __init__(self, link: EngineLink) -> None:
        self._link: EngineLink | None = link
        self._cutter = FrameCutter()
        self.prompts, self.grammars = SharedPrompts(), GrammarSender()
        self.heard = False  # something has come since this was last looked at
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        self.heard = True
        for frame in self._cutter.cut(data):
            if self._link is not None:
                self._link.on_message(decode_from_engine(frame))

    def connection_lost(self, exc: Exception | None) -> None:
        self.cut()

    def cut(self) -> None:
        """End the connection now: nothing that it still brings is looked at."""
        link, self._link = self._link, None
        if link is not None:
            self.transport.abort()
            self.lost.set_result(None)
            link.on_connection_lost(self)


class EngineLink:
    """A connection to one engine, made again when it breaks, and the streams that this engine serves.

    `open_link()` asks the engine for an address to connect to and for its model; it raises while there is none."""

    def __init__(
        self, name: str, open_link: Callable[[], Awaitable[tuple[Address, ModelInfo]]], group: EngineGroup
    ) -> None:
        self.name, self.engine = name, engine_id(name)
        self._open_link, self._group = open_link, group
        self._streams: dict[int, Stream] = {}
        self._last_number = 0
        self._connection: _Connection | None = None
        self._reports: deque[asyncio.Future[None]] = deque()  # not answered yet
        self._asked: dict[int, asyncio.Future[str]] = {}  # to be done, and not known to be yet
        self._must_forget = False  # before anything else, when it can be told
        self._snapshot: Snapshot | None = None
        self.info: ModelInfo
        self.reason: str | None = "The engine is starting."  # why it serves nothing now; None: it is healthy
        self.usable = False  # it is connected, and the engine has told its Status
        self.draining = self.is_asleep = False
        self.adapters: dict[str, AdapterState] = {}  # by name, as the engine told last
        self.digests: frozenset[str] = frozenset()  # of what new requests may have
        self.kept: dict[str, str] = {}  # folders by digest, of what resumed streams may have
        self.is_followed = False  # it tells of its cache and its load
        self.suspects: list[Stream] = []  # what the engine computed when its connection ended
        self._task = asyncio.create_task(self._keep_connected())

    def close(self) -> None:
        """Let the engine go; it aborts what is still running."""
        self._task.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.transport.close()

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def num_streams(self) -> int:
        """Live requests of this link."""
        return len(self._streams)

    @property
    def streams(self) -> list[Stream]:
        return list(self._streams.values())

    # ---- for its group --------------------------------------------------------------------------------------------

    def submit(self, stream: Stream) -> None:
        """Let this engine serve a stream, from where it stands."""
        stream.link, stream.number, stream.info, stream.waits = self, self._new_number(), self.info, False
        stream.on_engine(self.engine)
        self._streams[stream.number] = stream
        if (connection := self._connection) is None:
            return
        request = stream.submission()
        if request.params.grammar is not None and (update := connection.grammars.update([request.params.grammar])):
            self._send(update)
        message = Submit(stream.number, request_by_key(request), resumed=stream.accepted)
        self._send(connection.prompts.reduced(message))

    def drop(self, stream: Stream) -> bool:
        """Let this engine abort a stream; False, and nothing more, if it has ended."""
        if self._streams.pop(stream.number, None) is None:
            return False
        self._send(Abort(stream.number))
        return True

    def abort(self, request_id: str) -> None:
        """Let this engine end a request, whoever submitted it."""
        self._send(AbortById(request_id))

    def follow(self, wanted: bool) -> None:
        """Let this engine tell of its cache and its load from now on, beginning with a snapshot; or no more."""
        self.is_followed = wanted
        self._send(Follow(wanted))

    async def reset_prefix_cache(self) -> None:
        """Returns when this engine has forgotten what it has cached for no live request. One that is out of reach will
        be told before it is asked for anything else. Raises CallboardError if it does not say so in time."""
        if self._connection is None:
            self._must_forget = True
            return
        asked = self._forget()
        await asyncio.wait((asked,), timeout=_ANSWER_S)
        if not asked.done():
            text = f"Engine {self.engine} has not said within {_ANSWER_S:g} s that its prefix cache is empty"
            raise CallboardError(f"{text}; ask again.")

    def _forget(self) -> asyncio.Future[str]:
        return self._ask(Forget(self._new_number()))

    async def sleep(self, level: int) -> None:
        """Returns when this engine sleeps at a level, or is awake (0). Raises CallboardError if it does not."""
        asked = self._ask(Sleep(self._new_number(), level))
        await asyncio.wait((asked,))
        if error := "it was lost meanwhile." if asked.cancelled() else asked.result():
            raise CallboardError(f"Engine {self.engine} does not {'sleep' if level else 'wake up'}: {error}")

    def _ask(self, message: Forget | Sleep) -> asyncio.Future[str]:
        asked = self._asked[message.number] = asyncio.get_running_loop().create_future()
        self._send(message)
        return asked

    def _new_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def tell_adapters(self, entries: list[AdapterEntry], needs: dict[str, str] | None) -> None:
        """Send this engine new entries of names, and the adapters of this front's streams unless they are None."""
        self._send(Adapters(entries, needs))

    def has_adapter(self, stream: Stream) -> bool:
        """True if this engine has a stream's adapter, and the stream may have it here."""
        adapter = stream.request.adapter
        return not adapter or adapter in self.digests or (stream.accepted and adapter in self.kept)

    async def report(self, figures: MetricValues) -> Snapshot | None:
        """Give the engine what was counted, and get all that it knows: its last answer if it is slow, None if there is
        no engine, which then has not got `figures`."""
        if self._connection is None:
            return None
        asked = asyncio.get_running_loop().create_future()
        self._reports.append(asked)
        self._send(Report(figures))
        await asyncio.wait((asked,), timeout=_REPORT_S)
        return self._snapshot

    def _send(self, message: FromFront | GrammarUpdate | Heartbeat | Report) -> None:
        if self._connection is not None:  # else its streams are already with another link
            self._connection.transport.write(framed(encode(message)))

    # ---- the connection -------------------------------------------------------------------------------------------

    async def _connect(self) -> _Connection:
        address, self.info = await self._open_link()
        return await connect_stream(address, lambda: _Connection(self))

    async def _keep_connected(self) -> None:
        said, pause = "", _RETRY_S
        while True:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    connection = await self._connect()
            except EngineLoading as e:  # it has been waited for, and the next attempt waits again
                self.reason, pause = str(e), _RETRY_S
                continue
            except Exception as e:  # whatever keeps us from the engine now may pass: it is being started
                if said != (said := f"{type(e).__name__}: {e}"):
                    logger.warning("no link to engine %s yet: %s", self.name, said)
            else:
                said = ""
                if not connection.lost.done():
                    self._connection = connection
                    if self._must_forget:
                        self._must_forget = False
                        self._forget()
                    await self._watch(connection)
                    pause = _RETRY_S
            await asyncio.sleep(pause)  # an engine that cuts it off at once is not asked without end
            pause = min(2 * pause, _MAX_RETRY_S)

    async def _watch(self, connection: _Connection) -> None:
        """Returns when the connection is lost. Beats are counted, not seconds: when this process is late itself, it
        sends no more than one. LOST_AFTER_BEATS of them without an answer are enough."""
        num_silent = 0
        while not connection.lost.done():
            num_silent = 0 if connection.heard else num_silent + 1
            connection.heard = False
            if num_silent >= LOST_AFTER_BEATS:
                logger.warning("engine %s has answered none of %d heartbeats", self.name, LOST_AFTER_BEATS)
                connection.cut()
                return
            self._send(Heartbeat())
            await asyncio.wait((connection.lost,), timeout=HEARTBEAT_S)

    def on_connection_lost(self, connection: _Connection) -> None:
        """Its streams are for the group to place anew; the link knows them no more, and looks for its engine again."""
        if connection is not self._connection:
            return  # closed, or it ended before it was used
        self._connection, self.usable, self.is_followed = None, False, False
        self.draining = self.is_asleep = False
        self.reason = "The engine is restarting."
        self._must_forget = self._must_forget or bool(self._asked)
        for report in self._reports:
            report.cancel()
        for asked in self._asked.values():
            asked.cancel()
        self._reports.clear()
        self._asked.clear()
        self._snapshot = None
        streams, self._streams = self._streams, {}
        self.suspects = [stream for stream in streams.values() if not stream.waits]
        logger.warning("lost engine %s with %d streams", self.name, len(streams))
        self._group.on_lost(self, list(streams.values()))

    # ---- what the engine says -------------------------------------------------------------------------------------

    def on_message(self, message: FromEngine) -> None:
        if isinstance(message, Tokens):
            self._on_tokens(message)
        elif isinstance(message, CacheUpdate):
            self._group.on_cache_update(self, message)
        elif isinstance(message, Status):
            self.reason, self.draining, self.is_asleep = message.reason, message.draining, message.is_asleep
            adapters = self.adapters if self.usable else {}
            self.adapters = adapters | {state.entry.name: state for state in message.adapters}
            for name in message.dropped:
                self.adapters.pop(name, None)
            self.digests = frozenset[str]().union(*(state.digests for state in self.adapters.values()))
            self.kept, is_first = message.kept, not self.usable
            self.usable, self.suspects = True, []  # the engine lives: nothing has killed it
            self._group.on_status(self, message.adapters, is_first)
        elif isinstance(message, Snapshot):
            self._snapshot = message
            if not (asked := self._reports.popleft()).done():
                asked.set_result(None)
        elif isinstance(message, Done):
            self._asked.pop(message.number).set_result(message.error)
        elif isinstance(message, Refused) and (stream := self._streams.pop(message.stream, None)) is not None:
            self._group.on_refused(self, stream, message)

    def _on_tokens(self, frame: Tokens) -> None:
        streams = self._streams
        sampled_at = frame.sampled_at
        for number, has_slot in frame.accepted:
            if (stream := streams.get(number)) is not None:
                stream.accepted, stream.waits = True, not has_slot
                stream.refusals.clear()
        for number, num_cached, queued_s, prefill_s in frame.started:
            if (stream := streams.get(number)) is not None and not stream.received:
                output = stream.output()
                output.num_cached, output.queued_s, output.prefill_s = num_cached, queued_s, prefill_s
                output.first_sampled_at = sampled_at
                output.num_expected = stream.num_expected
        for number, num_draft_tokens, num_accepted in frame.verified:
            if (stream := streams.get(number)) is not None:
                output = stream.output()
                output.verified = output.verified or []
                output.verified.append(Verified(len(output.token_ids), num_draft_tokens, num_accepted))
        columns = zip(memoryview(frame.streams).cast("i"), memoryview(frame.token_ids).cast("i"), strict=True)
        for i, (number, token) in enumerate(columns):
            if (stream := streams.get(number)) is None:
                continue  # aborted or moved; the engine does not know it yet
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
        for number, vector in frame.pooled:
            if (stream := streams.get(number)) is not None:
                output = stream.output()
                output.pooled, output.sampled_at = vector, sampled_at
        for ended in frame.ended:
            if (stream := streams.pop(ended.stream, None)) is not None:
                stream.output().stop_token_id = ended.stop_token_id
                stream.end(FinishReason(ended.reason), ended.error)
