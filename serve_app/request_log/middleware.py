"""ASGI middleware that sees each request's end: for its line in the request log, and for http_requests_total."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping
from typing import Any

from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.page import ROUTES as PAGE_ROUTES
from serve_app.service.metrics import RequestContext, ServiceMetrics

_CLIENT_LEFT = 499
# Load balancers, Prometheus and the built-in page send these all the time.
_QUIET_PATHS = {"/health", "/ping", "/ready", "/load", "/metrics"} | {route.path for route in PAGE_ROUTES}


class ObserveRequests:
    """Reports each request to a front's metrics, except probes and files of the pages."""

    def __init__(self, app: ASGIApp, metrics: ServiceMetrics, routes: Iterable[Route]) -> None:
        self._app, self._metrics = app, metrics
        self._paths: Mapping[Any, str] = {route.endpoint: route.path for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context, status = RequestContext.of(scope), _CLIENT_LEFT

        def send_on(message: Message) -> Awaitable[None]:  # a plain function: it is called for each token
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            return send(message)

        try:
            await self._app(scope, receive, send_on)
        except Exception as e:  # Starlette answers it with a 500
            status, context.error = 500, context.error or f"{type(e).__name__}: {e}"
            raise
        finally:
            if context.path not in _QUIET_PATHS:
                handler = self._paths.get(scope.get("endpoint"), "none")
                self._metrics.answered(context, scope.get("request_id", ""), handler, status)
