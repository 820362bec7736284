"""A generation's HTTP: from a request's body to its answer or stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from runtime.background import in_background
from runtime.output.processor import Delta
from serve_app.http.auth import clean_id
from serve_app.http.lanes import run_preparation, run_rendering
from serve_app.http.limits import Deadline, check_counts, read_json_body
from serve_app.observability.context import RequestContext
from serve_app.protocol.answers import num_scores
from serve_app.protocol.errors import INTERNAL_ERROR, ApiError
from serve_app.protocol.prepared_request import PreparedRequest
from serve_app.protocol.sampling import MAX_SESSION_CHARS, SamplingFields
from serve_app.protocol.sse import MANY_SCORES, EventStream
from serve_app.service.endpoint import AnsweredAtOnce, Endpoint
from serve_app.service.models import Models
from serve_app.service.numbered_streams import NumberedStream, with_event_ids
from serve_app.service.recorded import RecordedRequests
from serve_app.settings import HttpSettings

logger = logging.getLogger(__name__)

_WATCHED_AFTER_S = 0.02  # time until the first check whether the client has left

# headers of opencode, Codex and Claude Code, and of others
_SESSIONS = b"x-session-affinity", b"x-session-id", b"session_id", b"session-id", b"x-claude-code-session-id"

_UNBUFFERED = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
EVENT_STREAM = [(b"content-type", EventStream.media_type), *_UNBUFFERED]


class Generation:
    """POST of one endpoint. It is an ASGI application, so each token is one `send`."""

    def __init__(
        self, models: Models, endpoint: Endpoint[Any], settings: HttpSettings, recorded: RecordedRequests
    ) -> None:
        self._models, self._endpoint, self._settings, self._recorded = models, endpoint, settings, recorded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext.of(scope)
        body = await read_json_body(scope, receive, self._settings)
        if body is None:
            return
        prepared: PreparedRequest[Any] | None = None
        async with UntilClientLeaves(receive, send):
            prepared = await self._prepared(body, scope)
        if prepared is None:
            return
        prepared = self._recorded.begin(prepared, self._endpoint.path, body)
        await self._generate(prepared, context, scope, receive, send)

    async def _generate(
        self, prepared: PreparedRequest[Any], context: RequestContext, scope: Scope, receive: Receive, send: Send
    ) -> None:
        async with UntilClientLeaves(receive, send) as send, aclosing(self._models.run(prepared, context)) as deltas:
            if prepared.request.stream:
                await self._stream(prepared, deltas, send)
            else:
                await self._answer(prepared, deltas, scope, receive, send)

    async def _prepared(self, body: bytes, scope: Scope) -> PreparedRequest[Any]:
        def prepare() -> PreparedRequest[Any]:
            return self._prepare(self._endpoint.read(body), scope)

        try:
            return await run_preparation(body, scope["owner"], self._endpoint.renders_chats, prepare)
        except AnsweredAtOnce as e:
            await self._models.of(e.model).sleep.load(e.keep_s)
            raise

    def _prepare(self, request: SamplingFields, scope: Scope) -> PreparedRequest[Any]:
        check_counts(request, self._settings)
        request_id = clean_id(request.request_id or scope["request_id"])

        def prepare(request: SamplingFields, answer_id: str = "") -> PreparedRequest[Any]:
            return self._models.prepare(self._endpoint, request, request_id, scope["owner"], answer_id)

        headers = dict(scope["headers"])
        if self._endpoint.operation.media_type != "text/event-stream":  # Ollama's API sends plain lines
            prepared = prepare(request)
        else:
            prepared = with_event_ids(headers, request, prepare)
        return _in_session(prepared, request.prompt_cache_key or _session(headers))

    async def _answer(
        self,
        prepared: PreparedRequest[Any],
        deltas: AsyncGenerator[list[Delta], None],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        choices = self._endpoint.choices(prepared)
        async with Deadline(self._settings.request_timeout_s):
            async for new in deltas:
                for delta in new:
                    choices[delta.index].add(delta)
        render = partial(self._endpoint.answer, prepared, choices)
        content = await run_rendering(num_scores(choices) > MANY_SCORES, prepared.owner, render)
        await Response(content, headers=prepared.headers(), media_type="application/json")(scope, receive, send)

    async def _stream(
        self, prepared: PreparedRequest[Any], deltas: AsyncGenerator[list[Delta], None], send: Send
    ) -> None:
        """Send a stream. Its status is sent with the first event, so a refusal by an engine can have its own status."""
        options = prepared.request.stream_options
        stream = self._endpoint.stream(prepared, options is not None and options.include_usage)
        if prepared.event_ids is not None:
            stream = NumberedStream(stream, prepared.event_ids)
        may_be_long = prepared.request.num_logprobs() is not None
        has_begun = False

        async def write(events: bytes) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                headers = [
                    (b"content-type", stream.media_type),
                    *_UNBUFFERED,
                    *((name.encode(), value.encode()) for name, value in prepared.headers().items()),
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": events, "more_body": True})

        try:
            async with Deadline(self._settings.request_timeout_s):
                async with _kept_alive(self._settings.keep_alive_s, partial(write, stream.keep_alive)):
                    new = await anext(deltas)
                await write(stream.first() + await self._events(stream, new, prepared.owner))
                async for new in deltas:
                    if events := await self._events(stream, new, prepared.owner) if may_be_long else stream.events(new):
                        await send({"type": "http.response.body", "body": events, "more_body": True})
            end = stream.last()
        except Exception as e:
            if not has_begun:
                raise
            await deltas.aclose()  # now, since a slow reader may never take the last event
            if not isinstance(e, ApiError):
                logger.exception("request %s failed", prepared.id)
            end = stream.failed(e if isinstance(e, ApiError) else INTERNAL_ERROR)
        await send({"type": "http.response.body", "body": end})

    async def _events(self, stream: EventStream, new: list[Delta], owner: str) -> bytes:
        """Return deltas as events. After the reader's pause, or with a prompt's scores, these may be many."""
        return await run_rendering(stream.is_long(new), owner, partial(stream.events, new))


def _in_session(prepared: PreparedRequest[Any], session: str) -> PreparedRequest[Any]:
    """Return the request as one of a session; an empty one is none."""
    if not session:
        return prepared
    return replace(prepared, requests=[replace(each, session=session) for each in prepared.requests])


def _session(headers: dict[bytes, bytes]) -> str:
    return next((headers[name] for name in _SESSIONS if name in headers), b"").decode("latin-1")[:MAX_SESSION_CHARS]


@asynccontextmanager
async def _kept_alive(period_s: float, write: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Call `write` periodically during its block, so proxies and clients see that the request is alive."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(period_s)
            await write()

    beating = in_background(asyncio.create_task(beat()), "keeping a stream alive")
    try:
        yield
    finally:
        beating.cancel()


async def _nowhere(message: Message) -> None:
    """The `send` of a block that sends nothing itself."""


class UntilClientLeaves:
    """Cancels its block, and suppresses that cancellation, when the client disconnects.

    It notices this by `receive`, or by a failed `send`, which it yields for use in any task. A task waits for `receive`
    only after _WATCHED_AFTER_S, since shorter answers do not need one."""

    def __init__(self, receive: Receive, send: Send = _nowhere) -> None:
        self._receive, self._send = receive, send
        self._watcher: asyncio.Task[None] | None = None
        self._has_left = False

    async def __aenter__(self) -> Send:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._start = asyncio.get_running_loop().call_later(_WATCHED_AFTER_S, self._start_watching)
        return self._send_or_leave

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self._start.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        # A cancellation by the server is not suppressed.
        return isinstance(error, asyncio.CancelledError) and self._has_left and not self._task.uncancel()

    def _start_watching(self) -> None:
        self._watcher = in_background(asyncio.create_task(self._watch()), "the wait for a client to leave")

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._task.cancel()

    async def _send_or_leave(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:
            self._leave()
            await asyncio.sleep(0)  # ends the block here, if it sends
