"""Routes for single requests: /v1/abort, /abort_requests, /v1/requests/{request_id} and /check_grammar."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from runtime.output.fields import invalid
from runtime.output.options import OutputOptions
from serve_app.apis.management.answers import Aborted, AbortedRequests, CheckedGrammar, RecordedRequest
from serve_app.http.json_routes import json_response, parsed_body
from serve_app.http.lanes import run_rendering
from serve_app.protocol.operation import BODY, route
from serve_app.protocol.shapes import RequestModel
from serve_app.service.grammars import compiled, ignored_paths
from serve_app.service.models import Models
from serve_app.service.recorded import RecordedRequests
from serve_app.settings import HttpSettings

_MAX_ABORT_BYTES = 4 << 10  # body with one id
_MAX_ABORTED = 1024  # requests at once
_RequestId = Annotated[str, Field(min_length=1, max_length=256)]


class AbortRequest(RequestModel):
    """POST /v1/abort: the id of an answer, or the client's own for the request (X-Request-Id, request_id)."""

    request_id: _RequestId


class AbortRequestsRequest(RequestModel):
    """POST /abort_requests, vLLM's form of the same for several requests."""

    request_ids: Annotated[list[_RequestId], Field(max_length=_MAX_ABORTED, fail_fast=True)] | None = None

    def check(self) -> None:
        if not self.request_ids:
            problem = "is missing or empty; send the ids of requests, or end all with POST /pause?mode=abort"
            raise invalid("request_ids", problem)


class GrammarRequest(RequestModel, OutputOptions):
    """POST /check_grammar: the fields of a completion's or a chat's request that constrain its output."""

    model_config = ConfigDict(extra="ignore")


def request_routes(models: Models, settings: HttpSettings, recorded: RecordedRequests) -> list[Route]:
    routes = SingleRequestRoutes(models, settings, recorded)
    return [
        route("/v1/abort", routes.abort, "End a request", Aborted, (AbortRequest,), BODY),
        route("/abort_requests", routes.abort_all, "End requests", AbortedRequests, (AbortRequestsRequest,), BODY),
        route(
            "/v1/requests/{request_id}",
            routes.recorded,
            "A request among a front's latest",
            RecordedRequest,
            errors=(404,),
        ),
        route(
            "/check_grammar",
            routes.check_grammar,
            "Compile the grammar of a request",
            CheckedGrammar,
            (GrammarRequest,),
            (*BODY, 429),
        ),
    ]


class SingleRequestRoutes:
    """Handlers that concern one request."""

    def __init__(self, models: Models, settings: HttpSettings, recorded: RecordedRequests) -> None:
        self._models, self._settings, self._recorded = models, settings, recorded

    async def abort(self, request: HttpRequest) -> Response:
        # The body is short enough to be parsed on the event loop, which alone may call the engines.
        settings = replace(self._settings, max_body_bytes=_MAX_ABORT_BYTES)
        wanted = await parsed_body(AbortRequest, request, settings)
        self._models.abort(wanted.request_id, request.scope["owner"])
        return json_response(Aborted(wanted.request_id))

    async def abort_all(self, request: HttpRequest) -> Response:
        """End several requests of this API key."""
        wanted = await parsed_body(AbortRequestsRequest, request, self._settings)
        ids = wanted.request_ids or []
        for request_id in ids:
            self._models.abort(request_id, request.scope["owner"])
        return json_response(AbortedRequests(len(ids)))

    async def check_grammar(self, request: HttpRequest) -> Response:
        """Compile the grammar of a request with these fields, and report its faults."""
        wanted = await parsed_body(GrammarRequest, request, self._settings)
        grammar = wanted.requested_grammar()
        owner = request.scope["owner"]
        found = await compiled(self._models.first.grammars, grammar, owner) if grammar else None
        ignored = [] if found is None or grammar is None else ignored_paths(found, grammar)
        return json_response(CheckedGrammar(ignored=ignored))

    async def recorded(self, request: HttpRequest) -> Response:
        owner = request.scope["owner"]
        render = self._recorded.found(request.path_params["request_id"], owner)
        return Response(await run_rendering(True, owner, render), media_type="application/json")
