"""What all engines are told at once, in vLLM's form: /reset_prefix_cache, /sleep, /wake_up and /is_sleeping."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from runtime.core.types import CallboardError
from runtime.output.fields import invalid, shortened
from serve_app.auth import check_origin
from serve_app.errors import ApiError
from serve_app.limits import Deadline
from serve_app.requests.shapes import RequestModel
from serve_app.response_routes import read_query
from serve_app.service import Service
from serve_app.settings import HttpSettings


class SleepQuery(RequestModel):
    """POST /sleep."""

    level: Annotated[int, Field(ge=1, le=2, strict=False)] = 1  # 2: the weights are dropped, and read again
    mode: Literal["keep"] = "keep"  # requests that run wait and go on; /v1/abort ends them


def engine_routes(service: Service, settings: HttpSettings) -> list[Route]:
    """The routes."""
    routes = _Routes(service, settings)
    return [
        Route("/reset_prefix_cache", routes.reset_prefix_cache, methods=["POST"]),
        Route("/sleep", routes.sleep, methods=["POST"]),
        Route("/wake_up", routes.wake_up, methods=["POST"]),
        Route("/is_sleeping", routes.is_sleeping),
    ]


class _Routes:
    def __init__(self, service: Service, settings: HttpSettings) -> None:
        self._service, self._settings = service, settings

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
