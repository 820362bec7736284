"""The HTTP front: OpenAI's endpoints as a small ASGI application over a Service."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from serve_app.answers import Delta
from serve_app.errors import ApiError
from serve_app.requests import ChatRequest, CompletionRequest, parse
from serve_app.service import Job, Service
from serve_app.sse import DONE, EventStream, encode_json, error_event, plain_answer

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 << 20
_BESIDE_THE_LOOP_BYTES = 64 << 10  # bodies from here on are parsed and tokenised in a thread: it takes milliseconds

_JSON = (b"content-type", b"application/json")
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def build_http_app(service: Service) -> Starlette:
    """All routes; whatever goes wrong is answered in OpenAI's error shape."""

    async def health(request: HttpRequest) -> Response:
        if reason := service.health():
            return _json({"status": "unavailable", "reason": reason}, 503, {"retry-after": "1"})
        return _json({"status": "ok"})

    async def models(request: HttpRequest) -> Response:
        return _json({"object": "list", "data": [service.model_card()]})

    async def model(request: HttpRequest) -> Response:
        service.check_model(request.path_params["name"])
        return _json(service.model_card())

    return Starlette(
        routes=[
            Route("/v1/completions", _Generation(service, CompletionRequest), methods=["POST"]),
            Route("/v1/chat/completions", _Generation(service, ChatRequest), methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
        ],
        exception_handlers={HTTPException: _http_error, ApiError: _api_error, Exception: _internal_error},
    )


class _Generation:
    """POST of one kind of request: an ASGI application of its own, since each token is a `send`."""

    def __init__(self, service: Service, kind: type[CompletionRequest] | type[ChatRequest]) -> None:
        self._service, self._kind = service, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _read_body(scope, receive)
        if body is None:
            return
        if len(body) < _BESIDE_THE_LOOP_BYTES:
            request, job = self._prepare(body)
        else:
            request, job = await asyncio.to_thread(self._prepare, body)
        async with _until_client_leaves(receive), aclosing(self._service.run(job)) as deltas:
            if request.stream:
                include_usage = request.stream_options is not None and request.stream_options.include_usage
                await self._stream(job, deltas, include_usage, send)
            else:
                await self._answer(job, deltas, scope, receive, send)

    def _prepare(self, body: bytes) -> tuple[CompletionRequest | ChatRequest, Job]:
        request = parse(self._kind, body)
        return request, self._service.prepare(request)

    async def _answer(
        self, job: Job, deltas: AsyncGenerator[list[Delta], None], scope: Scope, receive: Receive, send: Send
    ) -> None:
        choices = [Delta(i) for i in range(len(job.requests))]
        async for new in deltas:
            for delta in new:
                choices[delta.index].add(delta)
        content = plain_answer(job, choices, self._service.model, self._service.tokenizer)
        await Response(content, headers=job.headers(), media_type="application/json")(scope, receive, send)

    async def _stream(
        self, job: Job, deltas: AsyncGenerator[list[Delta], None], include_usage: bool, send: Send
    ) -> None:
        stream = EventStream(job, self._service.model, self._service.tokenizer, include_usage=include_usage)
        new = await anext(deltas)  # raises if the engine refuses: the status is still open
        headers = [*_EVENT_STREAM, *((name.encode(), value.encode()) for name, value in job.headers().items())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": stream.first() + stream.events(new), "more_body": True})
        try:
            async for new in deltas:
                if events := stream.events(new):
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            end = stream.last()
        except ApiError as e:
            end = error_event(e) + DONE
        except Exception:
            logger.exception("request %s failed", job.id)
            end = error_event(_INTERNAL_ERROR) + DONE
        await send({"type": "http.response.body", "body": end})


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


async def _read_body(scope: Scope, receive: Receive) -> bytes | None:
    """The request's body, or None if the client left while sending it; raises ApiError if it is too long."""
    length = dict(scope["headers"]).get(b"content-length", b"")
    parts, size, more = [], int(length) if length.isdigit() else 0, True
    if size <= MAX_BODY_BYTES:
        size = 0
        while more and size <= MAX_BODY_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
    if size > MAX_BODY_BYTES:
        raise ApiError(413, f"The request body is over {MAX_BODY_BYTES} bytes; send less.", code="body_too_large")
    return b"".join(parts)


# ---- errors ---------------------------------------------------------------------------------------------------------

_INTERNAL_ERROR = ApiError(
    500, "The server met an internal error; its log has the details.", type="server_error", code="internal_error"
)


def _json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(body), status, headers, "application/json")


def _api_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    retry = {} if error.retry_after_s is None else {"retry-after": str(math.ceil(error.retry_after_s))}
    return _json(error.body(), error.status, retry)


def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own refusals: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}"
    message = {
        404: f"There is no {what} here; see GET /v1/models, POST /v1/completions and POST /v1/chat/completions.",
        405: f"{what} is not allowed; use {(error.headers or {}).get('Allow', 'another method')}.",
    }.get(error.status_code, f"{what}: {error.detail}.")
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    return _json(ApiError(error.status_code, message, code=code).body(), error.status_code, error.headers)


def _internal_error(request: HttpRequest, error: Exception) -> Response:
    return _json(_INTERNAL_ERROR.body(), 500)
