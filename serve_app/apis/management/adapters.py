"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's form.

A running server loads adapters from one folder, which its operator sets."""

from __future__ import annotations

import asyncio
from typing import Annotated

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from runtime.base.config import MAX_NAME_CHARS
from runtime.output.fields import invalid, shortened
from serve_app.apis.management.allowed_folder import path_within
from serve_app.http.json_routes import parsed_body
from serve_app.http.limits import Deadline
from serve_app.protocol.errors import ApiError, unavailable
from serve_app.protocol.operation import BODY, ENGINES, route
from serve_app.protocol.shapes import RequestModel
from serve_app.service.models import Models
from serve_app.settings import HttpSettings

AdapterName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class LoadAdapterRequest(RequestModel):
    """POST /v1/load_lora_adapter. A relative path starts in the server's folder of adapters."""

    lora_name: AdapterName
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    base_model_name: str | None = None  # the adapter's model; default: the first one
    load_inplace: bool = False  # replace an adapter with the same name


class UnloadAdapterRequest(RequestModel):
    """POST /v1/unload_lora_adapter."""

    lora_name: AdapterName


def adapter_routes(models: Models, settings: HttpSettings) -> list[Route]:
    routes, errors = AdapterRoutes(models, settings), (*BODY, *ENGINES)
    return [
        route("/v1/load_lora_adapter", routes.load, "Load an adapter", None, (LoadAdapterRequest,), (*errors, 429)),
        route(
            "/v1/unload_lora_adapter", routes.unload, "Unload an adapter", None, (UnloadAdapterRequest,), (*errors, 404)
        ),
    ]


class AdapterRoutes:
    """Handlers that load and unload adapters."""

    def __init__(self, models: Models, settings: HttpSettings) -> None:
        self._models, self._settings = models, settings

    async def load(self, request: HttpRequest) -> Response:
        """Answer when all engines have the adapter."""
        folder = self._folder()
        asked = await parsed_body(LoadAdapterRequest, request, self._settings)
        for field, value in (("lora_name", asked.lora_name), ("lora_path", asked.lora_path)):
            if not value.isprintable():  # logs and errors show it in one line
                raise invalid(field, f"is {shortened(value)!r}, which has characters that cannot be printed")
        path = await asyncio.to_thread(path_within, folder, asked.lora_path, "lora_path", "adapters")
        async with Deadline(self._settings.request_timeout_s):
            await self._models.load_adapter(asked.lora_name, path, asked.load_inplace, asked.base_model_name)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def unload(self, request: HttpRequest) -> Response:
        """Answer when the last request with the adapter has ended."""
        self._folder()
        asked = await parsed_body(UnloadAdapterRequest, request, self._settings)
        async with Deadline(self._settings.request_timeout_s):
            await self._models.unload_adapter(asked.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    def _folder(self) -> str:
        """Return the folder of adapters; raises the 403 without a folder, and the 503 while engines refuse requests."""
        if (folder := self._settings.lora_folder) is None:
            text = "This server does not load adapters while it runs; start it with --lora-folder to allow it."
            raise ApiError(403, text, code="adapters_not_allowed")
        if reason := self._models.health():
            raise unavailable(reason)
        return folder
