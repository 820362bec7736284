"""The HTTP front: OpenAI's endpoints as a small ASGI application over a Service."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serve_app.auth import AuthMiddleware, Cors, clean_id
from serve_app.errors import ApiError, error_response, redacted, shortened
from serve_app.limits import beside_the_loop_if, check_counts, deadline, is_long, read_json_body
from serve_app.metrics import RequestContext
from serve_app.openapi import document
from serve_app.page import ROUTES as PAGE_ROUTES
from serve_app.prepared_request import PreparedRequest
from serve_app.requests import AbortRequest, ChatRequest, CompletionRequest, parse, validated
from serve_app.responses import Delta, num_scores
from serve_app.service import Service
from serve_app.settings import HttpSettings
from serve_app.sse import DONE, EventStream, encode_json, error_event, plain_answer
from serve_app.tokenization import detokenize, tokenize, tokenizer_info

logger = logging.getLogger(__name__)

_MAX_ABORT_BYTES = 4 << 10
_MANY_SCORES = 100  # positions whose log-probabilities take a while to render

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_KEEP_ALIVE = b": the request waits\n\n"  # a comment, which readers of event streams skip


def build_http_app(
    service: Service, settings: HttpSettings | None = None, *, echo_request_ids: bool = True
) -> Starlette:
    """All routes; whatever goes wrong is answered in OpenAI's error shape.

    Under Serve, which itself adds X-Request-Id to every answer, `echo_request_ids` is off.
    Raises CallboardError if the file of API keys cannot be read."""
    settings = settings or HttpSettings()

    async def health(request: HttpRequest) -> Response:
        if reason := service.health():
            return _unavailable(reason, status="unavailable", reason=redacted(reason))
        return _json({"status": "ok"})

    async def ready(request: HttpRequest) -> Response:
        reason = service.health()
        if not reason:
            return _json({"status": "ready"})
        status = "loading" if service.loading else "unavailable"
        return _unavailable(reason, status=status, phase=redacted(reason))

    async def version_(request: HttpRequest) -> Response:
        return _json({"version": version("callboard")})

    async def metrics(request: HttpRequest) -> Response:
        return Response(await service.metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def openapi(request: HttpRequest) -> Response:
        return _json(document(settings))

    async def info(request: HttpRequest) -> Response:
        return _json(tokenizer_info(service))

    async def abort(request: HttpRequest) -> Response:
        # Short enough to be read on the loop, from which alone engines can be told.
        body = await read_json_body(request.scope, request.receive, replace(settings, max_body_bytes=_MAX_ABORT_BYTES))
        asked = validated(AbortRequest, body or b"")
        service.abort(asked.request_id, request.scope["owner"])
        return _json({"request_id": asked.request_id, "object": "request.abort"})

    async def models(request: HttpRequest) -> Response:
        return _json({"object": "list", "data": [service.model_card()]})

    async def model(request: HttpRequest) -> Response:
        service.check_model(request.path_params["name"])
        return _json(service.model_card())

    return Starlette(
        routes=[
            Route("/v1/completions", _Generation(service, CompletionRequest, settings), methods=["POST"]),
            Route("/v1/chat/completions", _Generation(service, ChatRequest, settings), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/abort", abort, methods=["POST"]),
            Route("/tokenize", _Call(service, tokenize, settings), methods=["POST"]),
            Route("/detokenize", _Call(service, detokenize, settings), methods=["POST"]),
            Route("/tokenizer_info", info),
            Route("/health", health),
            *PAGE_ROUTES,
            Route("/ready", ready),
            Route("/version", version_),
            Route("/metrics", metrics),
            Route("/openapi.json", openapi),
        ],
        middleware=[
            *([Middleware(Cors, settings)] if settings.cors_origin else []),
            Middleware(AuthMiddleware, settings, echo_ids=echo_request_ids),
        ],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _internal_error},
    )


class _Call:
    """POST whose answer is a JSON object at once."""

    def __init__(
        self, service: Service, answer: Callable[[Service, bytes], Mapping[str, object]], settings: HttpSettings
    ) -> None:
        self._service, self._answer, self._settings = service, answer, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_json_body(scope, receive, self._settings)
        if body is not None:
            answer = await beside_the_loop_if(is_long(body), partial(self._answer, self._service, body))
            await _json(answer)(scope, receive, send)


class _Generation:
    """POST of one kind of request: an ASGI application of its own, since each token is a `send`."""

    def __init__(
        self, service: Service, kind: type[CompletionRequest] | type[ChatRequest], settings: HttpSettings
    ) -> None:
        self._service, self._kind, self._settings = service, kind, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext.of(scope["headers"])
        body = await read_json_body(scope, receive, self._settings)
        if body is None:
            return
        request, prepared = await beside_the_loop_if(is_long(body), partial(self._prepare, body, scope))
        async with _until_client_leaves(receive), aclosing(self._service.run(prepared, context)) as deltas:
            if request.stream:
                include_usage = request.stream_options is not None and request.stream_options.include_usage
                await self._stream(prepared, deltas, include_usage, send)
            else:
                await self._answer(prepared, deltas, scope, receive, send)

    def _prepare(self, body: bytes, scope: Scope) -> tuple[CompletionRequest | ChatRequest, PreparedRequest]:
        request = parse(self._kind, body)
        check_counts(request, self._settings)
        request_id = clean_id(request.request_id or scope["request_id"])
        return request, self._service.prepare(request, request_id, scope["owner"])

    async def _answer(
        self,
        prepared: PreparedRequest,
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
        render = partial(plain_answer, prepared, choices, self._service.model, self._service.tokenizer)
        content = await beside_the_loop_if(num_scores(choices) > _MANY_SCORES, render)
        await Response(content, headers=prepared.headers(), media_type="application/json")(scope, receive, send)

    async def _stream(
        self, prepared: PreparedRequest, deltas: AsyncGenerator[list[Delta], None], include_usage: bool, send: Send
    ) -> None:
        """The status stays open until there is something to send, so that an engine that refuses gets its own."""
        stream = EventStream(prepared, self._service.model, self._service.tokenizer, include_usage=include_usage)
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
                new = await self._first(deltas, partial(write, _KEEP_ALIVE))
                await write(stream.first() + await self._events(stream, new))
                async for new in deltas:
                    if events := await self._events(stream, new) if prepared.logprobs else stream.events(new):
                        await send({"type": "http.response.body", "body": events, "more_body": True})
            end = stream.last()
        except Exception as e:
            if not has_begun:
                raise
            await deltas.aclose()  # at the deadline of a reader that takes nothing: it may never take this event either
            if not isinstance(e, ApiError):
                logger.exception("request %s failed", prepared.id)
            end = error_event(e if isinstance(e, ApiError) else _INTERNAL_ERROR) + DONE
        await send({"type": "http.response.body", "body": end})

    async def _events(self, stream: EventStream, new: list[Delta]) -> bytes:
        """What is new as events; of a reader that was away, or of a prompt, there may be much."""
        return await beside_the_loop_if(num_scores(new) > _MANY_SCORES, partial(stream.events, new))

    async def _first(
        self, deltas: AsyncGenerator[list[Delta], None], keep_alive: Callable[[], Awaitable[None]]
    ) -> list[Delta]:
        """What comes first, however long it takes: proxies and clients see meanwhile that the request is alive."""
        first = asyncio.ensure_future(anext(deltas))
        try:
            while not (await asyncio.wait((first,), timeout=self._settings.keep_alive_s))[0]:
                await keep_alive()
        finally:
            if not first.done():
                first.cancel()
                await asyncio.wait((first,))  # a generator can be closed only when nobody is in it
        return first.result()


@asynccontextmanager
async def _until_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Cancels its body, and swallows that cancellation, when the client disconnects."""
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not has_left or task.uncancel():  # the server cancels too: that goes on
            raise
    finally:
        watcher.cancel()


# ---- errors ---------------------------------------------------------------------------------------------------------

_INTERNAL_ERROR = ApiError(
    500, "The server met an internal error; its log has the details.", type="server_error", code="internal_error"
)


def _json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(body), status, headers, "application/json")


def _unavailable(why: str, **fields: str) -> Response:
    """A 503 of OpenAI's shape, with fields for those who watch the server."""
    error = ApiError(503, why, type="server_error", code="engine_unavailable")
    return _json(error.body() | fields, 503, {"retry-after": "1"})


def _api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


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
