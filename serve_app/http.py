"""The HTTP front: OpenAI's endpoints as a small ASGI application over a Service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from runtime.output.fields import FieldError, shortened
from runtime.output.processor import Delta
from serve_app.auth import AuthMiddleware, Cors, clean_id
from serve_app.endpoints import ENDPOINTS, Endpoint
from serve_app.errors import ApiError, api_error, error_response, redacted
from serve_app.limits import beside_the_loop_if, check_counts, deadline, is_long, read_json_body
from serve_app.metrics import RequestContext
from serve_app.openapi import document
from serve_app.page import ROUTES as PAGE_ROUTES
from serve_app.prepared_request import PreparedRequest
from serve_app.requests import AbortRequest, parse
from serve_app.responses import encode_json, num_scores
from serve_app.service import Service
from serve_app.settings import HttpSettings
from serve_app.sse import EventStream
from serve_app.tokenization import detokenize, tokenize, tokenizer_info

logger = logging.getLogger(__name__)

_MAX_ABORT_BYTES = 4 << 10
_MANY_SCORES = 100  # positions whose log-probabilities take a while to render

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def build_http_app(
    service: Service, settings: HttpSettings | None = None, *, echo_request_ids: bool = True
) -> Starlette:
    """All routes; whatever goes wrong is answered in OpenAI's error shape.

    Under Serve, which itself adds X-Request-Id to every answer, `echo_request_ids` is off.
    Raises CallboardError if the file of API keys cannot be read."""
    settings = settings or HttpSettings()
    return Starlette(
        routes=_Routes(service, settings).all(),
        middleware=[
            *([Middleware(Cors, settings)] if settings.cors_origin else []),
            Middleware(AuthMiddleware, settings, echo_ids=echo_request_ids),
        ],
        exception_handlers={
            HTTPException: _http_error,
            ApiError: _refusal,
            FieldError: _refusal,
            Exception: _internal_error,
        },
    )


class _Routes:
    """The routes and the short answers."""

    def __init__(self, service: Service, settings: HttpSettings) -> None:
        self._service, self._settings = service, settings

    def all(self) -> list[Route]:
        service, settings = self._service, self._settings
        return [
            *(Route(e.path, _Generation(service, e, settings), methods=["POST"]) for e in ENDPOINTS),
            Route("/v1/models", _get(lambda: {"object": "list", "data": [service.model_card()]})),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/abort", self.abort, methods=["POST"]),
            Route("/tokenize", _post(tokenize, service, settings), methods=["POST"]),
            Route("/detokenize", _post(detokenize, service, settings), methods=["POST"]),
            Route("/tokenizer_info", _get(lambda: tokenizer_info(service))),
            Route("/health", self.health),
            *PAGE_ROUTES,
            Route("/ready", self.ready),
            Route("/version", _get(lambda: {"version": version("callboard")})),
            Route("/metrics", self.metrics),
            Route("/openapi.json", _get(lambda: document(settings))),
        ]

    async def health(self, request: HttpRequest) -> Response:
        if reason := self._service.health():
            return _unavailable(reason, status="unavailable", reason=redacted(reason))
        return _json({"status": "ok", **self._scale()})

    async def ready(self, request: HttpRequest) -> Response:
        if reason := self._service.health():
            status = "loading" if self._service.loading else "unavailable"
            return _unavailable(reason, status=status, phase=redacted(reason))
        return _json({"status": "ready", **self._scale()})

    def _scale(self) -> dict[str, str]:
        """A field that says so where a healthy server has no engine."""
        return {} if self._service.engines() else {"phase": "scaled to zero; the next request starts an engine"}

    async def metrics(self, request: HttpRequest) -> Response:
        return Response(await self._service.metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def abort(self, request: HttpRequest) -> Response:
        # Short enough to be read on the loop, from which alone engines can be told.
        settings = replace(self._settings, max_body_bytes=_MAX_ABORT_BYTES)
        asked = parse(AbortRequest, await read_json_body(request.scope, request.receive, settings) or b"")
        self._service.abort(asked.request_id, request.scope["owner"])
        return _json({"request_id": asked.request_id, "object": "request.abort"})

    async def model(self, request: HttpRequest) -> Response:
        self._service.check_model(request.path_params["name"])
        return _json(self._service.model_card())


def _get(answer: Callable[[], object]) -> Callable[[HttpRequest], Awaitable[Response]]:
    """GET of what `answer` says, which needs nothing of the request."""

    async def get(request: HttpRequest) -> Response:
        return _json(answer())

    return get


def _post(
    answer: Callable[[Service, bytes], Mapping[str, object]], service: Service, settings: HttpSettings
) -> Callable[[HttpRequest], Awaitable[Response]]:
    """POST whose answer is a JSON object at once."""

    async def post(request: HttpRequest) -> Response:
        body = await read_json_body(request.scope, request.receive, settings) or b""  # of a client that has left
        return _json(await beside_the_loop_if(is_long(body), partial(answer, service, body)))

    return post


class _Generation:
    """POST of one endpoint: an ASGI application of its own, since each token is a `send`."""

    def __init__(self, service: Service, endpoint: Endpoint[Any], settings: HttpSettings) -> None:
        self._service, self._endpoint, self._settings = service, endpoint, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext(traceparent=Headers(scope=scope).get("traceparent"))
        body = await read_json_body(scope, receive, self._settings)
        if body is None:
            return
        prepared = await beside_the_loop_if(is_long(body), partial(self._prepare, body, scope))
        async with (
            _until_client_leaves(receive, send) as send,
            aclosing(self._service.run(prepared, context)) as deltas,
        ):
            if prepared.request.stream:
                await self._stream(prepared, deltas, send)
            else:
                await self._answer(prepared, deltas, scope, receive, send)

    def _prepare(self, body: bytes, scope: Scope) -> PreparedRequest[Any]:
        request = self._endpoint.read(body)
        check_counts(request, self._settings)
        request_id = clean_id(request.request_id or scope["request_id"])
        return self._service.prepare(self._endpoint, request, request_id, scope["owner"])

    async def _answer(
        self,
        prepared: PreparedRequest[Any],
        deltas: AsyncGenerator[list[Delta], None],
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        choices = [Delta(i) for i in range(len(prepared.requests))]
        async with deadline(self._settings.request_timeout_s):
            async for new in deltas:
                for delta in new:
                    choices[delta.index].add(delta)
        render = partial(self._endpoint.answer, prepared, choices)
        content = await beside_the_loop_if(num_scores(choices) > _MANY_SCORES, render)
        await Response(content, headers=prepared.headers(), media_type="application/json")(scope, receive, send)

    async def _stream(
        self, prepared: PreparedRequest[Any], deltas: AsyncGenerator[list[Delta], None], send: Send
    ) -> None:
        """The status stays open until there is something to send, so that an engine that refuses gets its own."""
        options = prepared.request.stream_options
        stream = self._endpoint.stream(prepared, options is not None and options.include_usage)
        may_be_long = prepared.request.num_logprobs() is not None
        has_begun = False

        async def write(events: bytes) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                headers = [
                    *_EVENT_STREAM,
                    *((name.encode(), value.encode()) for name, value in prepared.headers().items()),
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": events, "more_body": True})

        try:
            async with deadline(self._settings.request_timeout_s):
                async with _kept_alive(self._settings.keep_alive_s, partial(write, stream.keep_alive)):
                    new = await anext(deltas)
                await write(stream.first() + await self._events(stream, new))
                async for new in deltas:
                    if events := await self._events(stream, new) if may_be_long else stream.events(new):
                        await send({"type": "http.response.body", "body": events, "more_body": True})
            end = stream.last()
        except Exception as e:
            if not has_begun:
                raise
            await deltas.aclose()  # at the deadline of a reader that takes nothing: it may never take this event either
            if not isinstance(e, ApiError):
                logger.exception("request %s failed", prepared.id)
            end = stream.failed(e if isinstance(e, ApiError) else _INTERNAL_ERROR)
        await send({"type": "http.response.body", "body": end})

    async def _events(self, stream: EventStream, new: list[Delta]) -> bytes:
        """Deltas as events; for a reader that was away, or of a prompt, there may be many."""
        return await beside_the_loop_if(num_scores(new) > _MANY_SCORES, partial(stream.events, new))


@asynccontextmanager
async def _kept_alive(period_s: float, write: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Writes something again and again while its body takes long: proxies and clients see that the request is alive."""

    async def beat() -> None:
        while True:
            await asyncio.sleep(period_s)
            await write()

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()


@asynccontextmanager
async def _until_client_leaves(receive: Receive, send: Send) -> AsyncIterator[Send]:
    """Cancels its body, and swallows that cancellation, when the client disconnects: `receive` tells so, or nothing can
    be sent any more by what this yields for `send`, whichever task sends."""
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    def leave() -> None:
        nonlocal has_left
        if not has_left:
            has_left = True
            task.cancel()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    async def send_or_leave(message: Message) -> None:
        try:
            await send(message)
        except OSError:
            leave()
            await asyncio.sleep(0)  # the body ends here, if it is the body that sends

    watcher = asyncio.create_task(watch())
    try:
        yield send_or_leave
    except asyncio.CancelledError:
        if not has_left or task.uncancel():  # the server cancels too: that goes on
            raise
    finally:
        watcher.cancel()


# ---- errors ---------------------------------------------------------------------------------------------------------

_INTERNAL_ERROR = ApiError(500, "The server met an internal error; its log has the details.", code="internal_error")


def _json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(body), status, headers, "application/json")


def _unavailable(why: str, **fields: str) -> Response:
    """A 503 of OpenAI's shape, with fields for those who watch the server."""
    return error_response(ApiError(503, why, code="engine_unavailable", retry_after_s=1.0), **fields)


def _refusal(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError | FieldError)
    return error_response(api_error(error) if isinstance(error, FieldError) else error)


def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own refusals: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {shortened(request.url.path)}"
    message = {
        404: f"There is no {what} here; GET /openapi.json tells what there is.",
        405: f"{what} is not allowed; use {(error.headers or {}).get('Allow', 'another method')}.",
    }.get(error.status_code, f"{what}: {error.detail}.")
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    return _json(ApiError(error.status_code, message, code=code).body(), error.status_code, error.headers)


def _internal_error(request: HttpRequest, error: Exception) -> Response:
    return _json(_INTERNAL_ERROR.body(), 500)
