"""The HTTP front: OpenAI's, Anthropic's and Ollama's endpoints as a small ASGI application over a Service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ExceptionHandler

from runtime.output.fields import FieldError, shortened
from serve_app.apis.batches.routes import batch_routes
from serve_app.apis.batches.worker import Batches
from serve_app.apis.management.adapters import adapter_routes
from serve_app.apis.management.engine import Kill, engine_routes
from serve_app.apis.management.tokenization import count_tokens, detokenize, tokenize, tokenizer_info
from serve_app.apis.ollama import models as ollama_models
from serve_app.apis.openapi import document
from serve_app.apis.pooled.routes import pooled_routes
from serve_app.apis.responses.routes import response_routes
from serve_app.apis.responses.store import OneFront, ResponseStore, StoredResponses
from serve_app.apis.table import ENDPOINTS
from serve_app.http.auth import AuthMiddleware, Cors, path_within
from serve_app.http.lanes import run_preparation, run_rendering
from serve_app.http.limits import read_json_body
from serve_app.observability.context import RequestContext
from serve_app.observability.middleware import ObserveRequests
from serve_app.page import ROUTES as PAGE_ROUTES
from serve_app.protocol.answers import encode_json
from serve_app.protocol.errors import INTERNAL_ERROR, ApiError, api_error, error_body, error_response, redacted
from serve_app.protocol.parsing import AbortRequest, GrammarRequest, parse
from serve_app.service.endpoint import AnsweredAtOnce
from serve_app.service.generation import Generation
from serve_app.service.grammars import compiled, ignored_paths
from serve_app.service.recorded import RecordedRequests
from serve_app.service.service import Service
from serve_app.settings import HttpSettings

_MAX_ABORT_BYTES = 4 << 10


def build_http_app(
    service: Service,
    settings: HttpSettings | None = None,
    *,
    stored: StoredResponses | None = None,
    batches: Batches | None = None,
    kill: Kill | None = None,
    echo_request_ids: bool = True,
) -> Starlette:
    """All routes; whatever goes wrong is answered in the error shape of the route's API.

    Without `stored` responses those of this application are kept in it alone. `batches` are told which routes answer
    their requests; without them, those of this application are left to others. `kill` ends a process for /chaos.
    Under Serve, which itself adds X-Request-Id to every answer, `echo_request_ids` is off.
    Raises CallboardError if the file of API keys cannot be read."""
    settings = settings or HttpSettings()
    stored = stored or StoredResponses(ResponseStore(settings), OneFront())
    batches = batches or Batches(settings)
    keys = settings.api_keys()  # once: the file may be replaced or gone later
    routes = [*_Routes(service, settings, stored, kill).all(), *batch_routes(settings, batches)]
    errors: dict[Any, ExceptionHandler] = {
        HTTPException: _http_error,
        ApiError: _refusal,
        FieldError: _refusal,
        AnsweredAtOnce: _answer_at_once,
        Exception: _internal_error,
    }
    batches.routes = Starlette(routes=routes, exception_handlers=errors)  # whose batch it is was checked
    middleware = [
        Middleware(ObserveRequests, service.metrics.answered, routes),
        *([Middleware(Cors, settings)] if settings.cors_origin else []),
        Middleware(AuthMiddleware, settings, keys, echo_ids=echo_request_ids),
    ]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=errors)


class _Routes:
    """The routes and the short answers."""

    def __init__(self, service: Service, settings: HttpSettings, stored: StoredResponses, kill: Kill | None) -> None:
        self._service, self._settings, self._stored, self._kill = service, settings, stored, kill
        id_prefixes = [endpoint.id_prefix for endpoint in ENDPOINTS]
        self._recorded = RecordedRequests(settings.recorded_request_bytes, id_prefixes)

    def all(self) -> list[Route]:
        service, settings, recorded = self._service, self._settings, self._recorded
        return [
            *(Route(e.path, Generation(service, e, settings, recorded), methods=["POST"]) for e in ENDPOINTS),
            *pooled_routes(service, settings),
            *response_routes(service, settings, self._stored, recorded),
            Route("/v1/requests/{request_id}", self.recorded),
            Route("/v1/models", _get(lambda: {"object": "list", "data": service.model_cards()})),
            Route("/v1/models/{name:path}", self.model),
            *adapter_routes(service, settings),
            *engine_routes(service, settings, self._kill),
            Route("/check_grammar", self.check_grammar, methods=["POST"]),
            Route("/v1/abort", self.abort, methods=["POST"]),
            Route("/v1/messages/count_tokens", _post(count_tokens, service, settings, True), methods=["POST"]),
            Route("/api/tags", _get(lambda: ollama_models.tags(service))),
            Route("/api/ps", _get(lambda: ollama_models.running(service))),
            Route("/api/show", _post(ollama_models.show, service, settings, True), methods=["POST"]),
            Route("/api/version", _get(ollama_models.version)),
            Route("/tokenize", _post(tokenize, service, settings, True), methods=["POST"]),
            Route("/detokenize", _post(detokenize, service, settings), methods=["POST"]),
            Route("/tokenizer_info", _get(lambda: tokenizer_info(service))),
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/load", _get(lambda: {"server_load": service.num_live})),
            Route("/server_info", _get(self.description)),
            *PAGE_ROUTES,
            Route("/ready", self.ready),
            Route("/version", _get(lambda: {"version": version("callboard")})),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
        ]

    def description(self) -> dict[str, Any]:
        return self._service.description() | {"allow_chaos": self._settings.allow_chaos}

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
        """A field that says so where a healthy server has no engine, or one that sleeps."""
        if not self._service.engines():
            return {"phase": "scaled to zero; the next request starts an engine"}
        return {"phase": "asleep; requests wait for POST /wake_up"} if self._service.is_asleep else {}

    async def metrics(self, request: HttpRequest) -> Response:
        return Response(await self._service.metrics.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def abort(self, request: HttpRequest) -> Response:
        # Short enough to be read on the loop, from which alone engines can be told.
        settings = replace(self._settings, max_body_bytes=_MAX_ABORT_BYTES)
        asked = parse(AbortRequest, await read_json_body(request.scope, request.receive, settings) or b"")
        self._service.abort(asked.request_id, request.scope["owner"])
        return _json({"request_id": asked.request_id, "object": "request.abort"})

    async def check_grammar(self, request: HttpRequest) -> Response:
        """Compiles the grammar of a request with these fields, whose faults so show before it is sent."""
        asked = parse(GrammarRequest, await read_json_body(request.scope, request.receive, self._settings) or b"")
        grammar = asked.requested_grammar()
        ignored = ignored_paths(await compiled(self._service.grammars, grammar), grammar) if grammar else []
        return _json({"object": "grammar.check", "ignored": ignored})

    async def recorded(self, request: HttpRequest) -> Response:
        owner = request.scope["owner"]
        render = self._recorded.found(request.path_params["request_id"], owner)
        return Response(await run_rendering(True, owner, render), media_type="application/json")

    async def openapi(self, request: HttpRequest) -> Response:
        render = partial(_document, self._settings)
        content = await run_rendering(True, request.scope["owner"], render)  # to make it takes a while
        return Response(content, media_type="application/json")

    async def model(self, request: HttpRequest) -> Response:
        return _json(self._service.model_card(request.path_params["name"]))


def _get(answer: Callable[[], object]) -> Callable[[HttpRequest], Awaitable[Response]]:
    """GET of what `answer` says, which needs nothing of the request."""

    async def get(request: HttpRequest) -> Response:
        return _json(answer())

    return get


def _post(
    answer: Callable[[Service, bytes], Mapping[str, object]],
    service: Service,
    settings: HttpSettings,
    may_render: bool = False,
) -> Callable[[HttpRequest], Awaitable[Response]]:
    """POST whose answer is a JSON object at once."""

    async def post(request: HttpRequest) -> Response:
        body = await read_json_body(request.scope, request.receive, settings) or b""  # of a client that has left
        work = partial(_answered, answer, service, body)
        content = await run_preparation(body, request.scope["owner"], may_render, work)
        return Response(content, media_type="application/json")

    return post


def _document(settings: HttpSettings) -> bytes:
    return encode_json(document(settings))


def _answered(answer: Callable[[Service, bytes], Mapping[str, object]], service: Service, body: bytes) -> bytes:
    return encode_json(answer(service, body))


# ---- errors ---------------------------------------------------------------------------------------------------------


def _json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(body), status, headers, "application/json")


def _unavailable(why: str, **fields: str) -> Response:
    """A 503 of OpenAI's shape, with fields for those who watch the server."""
    return error_response(ApiError(503, why, code="engine_unavailable", retry_after_s=1.0), **fields)


def _refusal(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError | FieldError)
    refusal = api_error(error) if isinstance(error, FieldError) else error
    RequestContext.of(request.scope).error = str(refusal)
    return error_response(refusal, path_within(request.scope))


def _answer_at_once(request: HttpRequest, answer: Exception) -> Response:
    assert isinstance(answer, AnsweredAtOnce)
    return Response(answer.content, media_type="application/json")


def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own refusals: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {shortened(request.url.path)}"
    message = {
        404: f"There is no {what} here; GET /docs shows what there is (/openapi.json for programs).",
        405: f"{what} is not allowed; use {(error.headers or {}).get('Allow', 'another method')}.",
    }.get(error.status_code, f"{what}: {error.detail}.")
    RequestContext.of(request.scope).error = message
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    body = error_body(ApiError(error.status_code, message, code=code), path_within(request.scope))
    return _json(body, error.status_code, error.headers)


def _internal_error(request: HttpRequest, error: Exception) -> Response:
    return error_response(INTERNAL_ERROR, path_within(request.scope))
