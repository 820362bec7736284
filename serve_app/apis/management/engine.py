"""Routes for all engines at once, in vLLM's form: /reset_prefix_cache, /sleep, /wake_up and /is_sleeping.

POST /chaos kills one of their processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from runtime.base.types import CallboardError
from runtime.output.fields import invalid, shortened
from serve_app.apis.management.answers import Killed, Sleeping
from serve_app.http.auth import check_origin
from serve_app.http.json_routes import json_response
from serve_app.http.limits import Deadline
from serve_app.protocol.errors import ApiError, unavailable
from serve_app.protocol.operation import ENGINES, route
from serve_app.protocol.parsing import read_query
from serve_app.protocol.shapes import RequestModel
from serve_app.service.models import Models
from serve_app.settings import HttpSettings


class SleepQuery(RequestModel):
    """POST /sleep."""

    level: Annotated[int, Field(ge=1, le=2, strict=False)] = 1  # 2 drops the weights and reads them again
    mode: Literal["keep"] = "keep"  # running requests wait and go on; /v1/abort ends them


class ChaosQuery(RequestModel):
    """POST /chaos."""

    role: Literal["engine", "runner"] = "engine"


Kill = Callable[[str], Awaitable[dict[str, object]]]  # kills a process by role; returns engine and process id


def engine_routes(models: Models, settings: HttpSettings, kill: Kill | None) -> list[Route]:
    """Return the routes. Without `kill`, /chaos is not allowed."""
    routes = EngineRoutes(models, settings, kill)
    post: dict[str, Any] = {"errors": (400, *ENGINES), "method": "POST"}
    reset: dict[str, Any] = {"errors": ENGINES, "method": "POST"}
    return [
        route("/reset_prefix_cache", routes.reset_prefix_cache, "Evict prefixes without live requests", None, **reset),
        route("/sleep", routes.sleep, "Release memory", None, query=SleepQuery, **post),
        route("/wake_up", routes.wake_up, "Compute again", None, **post),
        route("/is_sleeping", routes.is_sleeping, "Whether an engine sleeps", Sleeping, errors=(503,)),
        route("/chaos", routes.chaos, "Kill an engine or runner", Killed, query=ChaosQuery, **post),
    ]


class EngineRoutes:
    """Handlers that act on all engines."""

    def __init__(self, models: Models, settings: HttpSettings, kill: Kill | None) -> None:
        self._models, self._settings, self._kill = models, settings, kill

    async def reset_prefix_cache(self, request: HttpRequest) -> Response:
        """Answer when every engine has evicted the prefixes without a live request."""
        check_origin(request, self._settings)
        return await self._done(self._models.reset_prefix_cache())

    async def sleep(self, request: HttpRequest) -> Response:
        """Answer when every engine has released its memory."""
        level = read_query(SleepQuery, request).level
        self._check(request)
        return await self._done(self._models.first.engine_client().sleep(level))

    async def wake_up(self, request: HttpRequest) -> Response:
        """Answer when every engine can compute again."""
        if tags := request.query_params.get("tags"):
            raise invalid("tags", f"is {shortened(tags)!r}; engines wake up whole: leave it out")
        self._check(request)
        return await self._done(self._models.first.engine_client().sleep(0))

    async def is_sleeping(self, request: HttpRequest) -> Response:
        """Answer true while an engine sleeps."""
        return json_response(Sleeping(self._models.first.engine_client().is_asleep))

    async def chaos(self, request: HttpRequest) -> Response:
        """Kill a random engine or runner; answer with its engine and process id."""
        role = read_query(ChaosQuery, request).role
        check_origin(request, self._settings)
        if not self._settings.allow_chaos or self._kill is None:
            text = "Clients may not kill processes of this server; start it with --allow-chaos to allow it."
            raise ApiError(403, text, code="chaos_not_allowed")
        try:
            return json_response({"object": "chaos.kill", "role": role, **await self._kill(role)})
        except CallboardError as e:
            raise ApiError(503, str(e), code="nothing_killed", retry_after_s=1.0) from e

    def _check(self, request: HttpRequest) -> None:
        check_origin(request, self._settings)
        if not self._models.first.engine_client().info.can_sleep:
            text = "This server does not sleep; start it with --sleep-mode to allow it."
            raise ApiError(403, text, code="sleep_not_allowed")

    async def _done(self, work: Awaitable[None]) -> Response:
        try:
            async with Deadline(self._settings.request_timeout_s):
                await work
        except ApiError:
            raise
        except CallboardError as e:
            raise unavailable(str(e)) from e
        return PlainTextResponse("")
