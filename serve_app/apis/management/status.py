"""Routes that report the state of the server: probes, metrics, its models and its version."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from typing import Literal

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from serve_app.apis.management.answers import FrontLoad, Health, ModelList, NotReady, ServerInfo, Unhealthy, Version
from serve_app.http.json_routes import get_json, json_response
from serve_app.protocol.errors import error_response, redacted, unavailable
from serve_app.protocol.operation import ApiRoute, Operation, route
from serve_app.service.model_card import ModelCard
from serve_app.service.models import Models
from serve_app.service.service import Service
from serve_app.settings import HttpSettings

_PING = Operation("The same, for SageMaker", Health, unready=Unhealthy, open=True)


def status_routes(models: Models, settings: HttpSettings) -> list[Route]:
    routes = StatusRoutes(models)
    cards = get_json(lambda: ModelList(data=models.model_cards()))
    load = get_json(lambda: FrontLoad(models.num_live))
    limits = {name: getattr(settings, name) for name in ("allow_chaos", "max_images", "max_image_bytes")}
    server_info = get_json(lambda: models.first.description() | limits)
    own_version = get_json(lambda: Version(version("callboard")))
    return [
        route("/v1/models", cards, "The served model and its adapters", ModelList, errors=(503,)),
        route("/v1/models/{name:path}", routes.model, "A model or adapter, by its name", ModelCard, errors=(404, 503)),
        route("/health", routes.health, "Whether the server can serve now", Health, unready=Unhealthy, open=True),
        route("/ready", routes.ready, "Whether the start is complete", Health, unready=NotReady, open=True),
        ApiRoute("/ping", routes.health, _PING, replace(_PING, method="POST")),
        route("/load", load, "The number of running requests of this front", FrontLoad),
        route("/server_info", server_info, "The model and its numerics", ServerInfo, errors=(503,)),
        route("/metrics", routes.metrics, "All metrics of the application, for Prometheus", None),
        route("/version", own_version, "The version of Callboard", Version),
    ]


class StatusRoutes:
    """Handlers that report the state of the server."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def health(self, request: HttpRequest) -> Response:
        if reason := self._models.health():
            return error_response(unavailable(reason), status="unavailable", reason=redacted(reason))
        return json_response(self._health("ok"))

    async def ready(self, request: HttpRequest) -> Response:
        if reason := self._models.health():
            status = "loading" if self._models.first.loading else "unavailable"
            return error_response(unavailable(reason), status=status, phase=redacted(reason))
        return json_response(self._health("ready"))

    def _health(self, status: Literal["ok", "ready"]) -> Health:
        """Return the state with the phases of models that no engine computes."""
        phases = {service.model: phase for service in self._models if (phase := _phase_of(service)) is not None}
        if len(list(self._models)) == 1:
            return Health(status=status, phase=next(iter(phases.values()), None))
        texts = [f"{model}: {phase}." for model, phase in phases.items()]
        return Health(status=status, phase=" ".join(texts) or None, phases=phases)

    async def metrics(self, request: HttpRequest) -> Response:
        return Response(await self._models.exposition(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def model(self, request: HttpRequest) -> Response:
        return json_response(self._models.model_card(request.path_params["name"]))


def _phase_of(service: Service) -> str | None:
    """Return the phase of a model's engines; None if they compute."""
    client = service.engine_client()
    if waits := service.sleep.waits():
        return waits
    if not client.engines():
        return "scaled to zero; the next request starts an engine"
    if client.is_asleep:
        return "asleep; requests wait for POST /wake_up"
    return "paused; requests wait for POST /resume" if client.is_paused else None
