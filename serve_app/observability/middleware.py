"""ASGI middleware that sees each request's end: for its line in the request log, and for http_requests_total."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.observability.context import RequestContext
from serve_app.page import ROUTES as PAGE_ROUTES

_CLIENT_LEFT = 499
# Load balancers, Prometheus and the built-in page send these every few seconds.
_QUIET_PATHS = {"/health", "/ping", "/ready", "/load", "/metrics"} | {route.path for route in PAGE_ROUTES}


class ObserveRequests:
    """Calls `on_end` for each request, except for probes and files of the pages.

    `ServiceMetrics.answered` names its arguments."""

    def __init__(
        self, app: ASGIApp, on_end: Callable[[RequestContext, str, str, int], None], routes: Iterable[Route]
    ) -> None:
        self._app, self._on_end = app, on_end
        self._paths: Mapping[Any, str] = {route.endpoint: route.path for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context, status = RequestContext.of(scope), _CLIENT_LEFT

        def send_on(message: Message) -> Awaitable[None]:  # a plain function, since each token calls it
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception as e:  # Starlette answers with a 500
            status, context.error = 500, context.error or f"{type(e).__name__}: {e}"
            raise
        finally:
            if context.path not in _QUIET_PATHS:
                handler = self._paths.get(scope.get("endpoint"), "none")
                self._on_end(context, scope.get("request_id", ""), handler, status)
