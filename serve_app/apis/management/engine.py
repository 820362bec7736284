"""What all engines are told at once, in vLLM's form: /reset_prefix_cache, /sleep, /wake_up and /is_sleeping.

And /chaos, which kills one of their processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from runtime.output.fields import invalid, shortened
from runtime.spec.types import CallboardError
from serve_app.apis.responses.routes import read_query
from serve_app.http.auth import check_origin
from serve_app.http.limits import Deadline
from serve_app.protocol.errors import ApiError
from serve_app.protocol.shapes import RequestModel
from serve_app.service.service import Service
from serve_app.settings import HttpSettings


class SleepQuery(RequestModel):
    """POST /sleep."""

    level: Annotated[int, Field(ge=1, le=2, strict=False)] = 1  # 2: the weights are dropped, and read again
    mode: Literal["keep"] = "keep"  # requests that run wait and go on; /v1/abort ends them


class ChaosQuery(RequestModel):
    """POST /chaos."""

    role: Literal["engine", "runner"] = "engine"


Kill = Callable[[str], Awaitable[dict[str, object]]]  # kills a process of a role, and returns what it was


def engine_routes(service: Service, settings: HttpSettings, kill: Kill | None) -> list[Route]:
    """The routes. Without `kill` there are no processes that /chaos could end."""
    routes = _Routes(service, settings, kill)
    return [
        Route("/reset_prefix_cache", routes.reset_prefix_cache, methods=["POST"]),
        Route("/sleep", routes.sleep, methods=["POST"]),
        Route("/wake_up", routes.wake_up, methods=["POST"]),
        Route("/is_sleeping", routes.is_sleeping),
        Route("/chaos", routes.chaos, methods=["POST"]),
    ]


class _Routes:
    def __init__(self, service: Service, settings: HttpSettings, kill: Kill | None) -> None:
        self._service, self._settings, self._kill = service, settings, kill

    async def reset_prefix_cache(self, request: HttpRequest) -> Response:
        """Answers when every engine has forgotten the prefixes that no live request holds."""
        check_origin(request, self._settings)
        return await self._done(self._service.engine_client().reset_prefix_cache())

    async def sleep(self, request: HttpRequest) -> Response:
        """Answers when every engine has given its memory back."""
        level = read_query(SleepQuery, request).level
        self._check(request)
        return await self._done(self._service.engine_client().sleep(level))

    async def wake_up(self, request: HttpRequest) -> Response:
        """Answers when every engine can compute again."""
        if tags := request.query_params.get("tags"):
            raise invalid("tags", f"is {shortened(tags)!r}; engines wake up whole: leave it out")
        self._check(request)
        return await self._done(self._service.engine_client().sleep(0))

    async def is_sleeping(self, request: HttpRequest) -> Response:
        """True while an engine sleeps."""
        return JSONResponse({"is_sleeping": self._service.engine_client().is_asleep})

    async def chaos(self, request: HttpRequest) -> Response:
        """Kills an engine or a runner, drawn at random; answers with its engine and its process id."""
        role = read_query(ChaosQuery, request).role
        check_origin(request, self._settings)
        if not self._settings.allow_chaos or self._kill is None:
            text = "Clients may not kill processes of this server; start it with --allow-chaos if they should."
            raise ApiError(403, text, code="chaos_not_allowed")
        try:
            return JSONResponse({"object": "chaos.kill", "role": role, **await self._kill(role)})
        except CallboardError as e:
            raise ApiError(503, str(e), code="nothing_killed", retry_after_s=1.0) from e

    def _check(self, request: HttpRequest) -> None:
        check_origin(request, self._settings)
        if not self._service.engine_client().info.can_sleep:
            text = "This server does not sleep; start it with --sleep-mode if it should."
            raise ApiError(403, text, code="sleep_not_allowed")

    async def _done(self, work: Awaitable[None]) -> Response:
        try:
            async with Deadline(self._settings.request_timeout_s):
                await work
        except ApiError:
            raise
        except CallboardError as e:
            raise ApiError(503, str(e), code="engine_unavailable", retry_after_s=1.0) from e
        return PlainTextResponse("")
