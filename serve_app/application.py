"""The HTTP front: all APIs as a small ASGI application over a Service."""

from __future__ import annotations

from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ExceptionHandler

from runtime.output.fields import FieldError, shortened
from serve_app.apis.batches.worker import Batches
from serve_app.apis.management.answers import Document
from serve_app.apis.management.engine import Kill
from serve_app.apis.openapi import document
from serve_app.apis.responses.store import OneFront, ResponseStore, StoredResponses
from serve_app.apis.table import api_routes
from serve_app.http.auth import AuthMiddleware, Cors, path_within
from serve_app.http.json_routes import json_response
from serve_app.http.lanes import run_rendering
from serve_app.observability.context import RequestContext
from serve_app.observability.middleware import ObserveRequests
from serve_app.page import ROUTES as PAGE_ROUTES
from serve_app.protocol.answers import encode_json
from serve_app.protocol.dialects import dialect_of
from serve_app.protocol.errors import INTERNAL_ERROR, ApiError, api_error, error_body, error_response
from serve_app.protocol.operation import route
from serve_app.service.adapter_folder import AdapterFolder
from serve_app.service.endpoint import AnsweredAtOnce
from serve_app.service.models import Models
from serve_app.service.service import Service
from serve_app.settings import HttpSettings


def build_http_app(
    served: Service | Models,
    settings: HttpSettings | None = None,
    *,
    stored: StoredResponses | None = None,
    batches: Batches | None = None,
    kill: Kill | None = None,
    echo_request_ids: bool = True,
) -> Starlette:
    """Return the application with all routes; each reports errors in its API's shape.

    A single service is a table with one model.
    By default `stored` holds only this application's responses, and batches do not run. `kill` ends a process for
    /chaos. `echo_request_ids` is false under Serve, which adds X-Request-Id itself.

    Raises CallboardError if the API key file cannot be read."""
    models = served if isinstance(served, Models) else Models([served])
    settings = settings or HttpSettings()
    if settings.lora_on_demand and settings.lora_folder is not None:
        models.adapter_folder = AdapterFolder(settings.lora_folder)
    stored = stored or StoredResponses(ResponseStore(settings), OneFront())
    batches = batches or Batches(settings)
    keys = settings.api_keys()  # read once, since the file may change later
    routes = [*api_routes(models, settings, stored, batches, kill), *PAGE_ROUTES]
    routes.append(_openapi_route(routes, settings))
    errors: dict[Any, ExceptionHandler] = {
        HTTPException: _http_error,
        ApiError: _refusal,
        FieldError: _refusal,
        AnsweredAtOnce: _answer_at_once,
        Exception: _internal_error,
    }
    batches.routes = Starlette(routes=routes, exception_handlers=errors)  # no keys: a batch has its owner
    middleware = [
        Middleware(ObserveRequests, models.first.metrics.answered, routes),
        *([Middleware(Cors, settings)] if settings.cors_origin else []),
        Middleware(AuthMiddleware, settings, keys, echo_ids=echo_request_ids, takes_images=lambda: models.takes_images),
    ]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=errors)


def _openapi_route(routes: list[Route], settings: HttpSettings) -> Route:
    contents: list[bytes] = []

    def render() -> bytes:
        if not contents:
            contents.append(encode_json(document(routes, settings)))
        return contents[0]

    async def openapi(request: HttpRequest) -> Response:
        content = await run_rendering(True, request.scope["owner"], render)  # the first one takes a while
        return Response(content, media_type="application/json")

    return route("/openapi.json", openapi, "This document", Document)


# ---- errors ---------------------------------------------------------------------------------------------------------


def _refusal(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, ApiError | FieldError)
    refusal = api_error(error) if isinstance(error, FieldError) else error
    path = path_within(request.scope)
    refusal = refusal.in_words_of(dialect_of(path))
    RequestContext.of(request.scope).error = str(refusal)
    return error_response(refusal, path)


def _answer_at_once(request: HttpRequest, answer: Exception) -> Response:
    assert isinstance(answer, AnsweredAtOnce)
    return Response(answer.content, media_type="application/json")


def _http_error(request: HttpRequest, error: Exception) -> Response:
    """Report an unknown route, or a route with other methods."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {shortened(request.url.path)}"
    message = {
        404: f"There is no {what} here; GET /docs lists all routes (/openapi.json for programs).",
        405: f"{what} is not allowed; use {(error.headers or {}).get('Allow', 'another method')}.",
    }.get(error.status_code, f"{what}: {error.detail}.")
    RequestContext.of(request.scope).error = message
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    body = error_body(ApiError(error.status_code, message, code=code), path_within(request.scope))
    return json_response(body, error.status_code, error.headers)


def _internal_error(request: HttpRequest, error: Exception) -> Response:
    return error_response(INTERNAL_ERROR, path_within(request.scope))
