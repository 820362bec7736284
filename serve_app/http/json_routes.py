"""Handlers for answers of one JSON value."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from serve_app.http.lanes import run_preparation
from serve_app.http.limits import read_json_body
from serve_app.protocol.answers import encode_json
from serve_app.protocol.parsing import parse
from serve_app.protocol.shapes import RequestModel
from serve_app.settings import HttpSettings

_R = TypeVar("_R", bound=RequestModel)
Handler = Callable[[HttpRequest], Awaitable[Response]]


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(encode_json(body), status, headers, "application/json")


async def parsed_body(kind: type[_R], request: HttpRequest, settings: HttpSettings) -> _R:
    """Return the request in a body of JSON; raises FieldError or ApiError, also if the client left."""
    return parse(kind, await read_json_body(request.scope, request.receive, settings) or b"")


def get_json(answer: Callable[[], object]) -> Handler:
    """Return a GET handler; `answer` does not depend on the request."""

    async def get(request: HttpRequest) -> Response:
        return json_response(answer())

    return get


def post_json(answer: Callable[[bytes], object], settings: HttpSettings, may_render: bool = False) -> Handler:
    """Return a POST handler; `answer` maps the body to a value. `may_render` is true if it renders a chat."""

    async def post(request: HttpRequest) -> Response:
        body = await read_json_body(request.scope, request.receive, settings) or b""  # empty if the client left
        content = await run_preparation(body, request.scope["owner"], may_render, lambda: encode_json(answer(body)))
        return Response(content, media_type="application/json")

    return post
