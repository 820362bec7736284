"""Routes about models: /api/tags, /api/ps, /api/version, /api/show, /api/pull, and refusals of changes."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from runtime.output.fields import invalid
from serve_app.apis.ollama.answers import OllamaError, OllamaModel, OllamaModels, OllamaStatus, OllamaVersion
from serve_app.http.json_routes import Handler, get_json, json_response, post_json
from serve_app.protocol.errors import ApiError
from serve_app.protocol.operation import BODY, route
from serve_app.protocol.parsing import parse
from serve_app.protocol.shapes import RequestModel
from serve_app.service.model_card import ModelCard
from serve_app.service.models import Models
from serve_app.settings import HttpSettings

# Ollama's version with these routes and fields; clients refuse older ones.
VERSION = "0.12.11"
_LAST = datetime(9999, 1, 1, tzinfo=UTC).timestamp()
_ARCHITECTURE = "callboard"  # begins the keys in `model_info`


class ShowRequest(RequestModel):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None  # the older field
    verbose: bool | None = None

    def check(self) -> None:
        if self.model is None and self.name is None:
            raise invalid("model", "is missing; it is required")


class PullRequest(ShowRequest):
    """POST /api/pull."""

    insecure: bool | None = None
    stream: bool | None = None  # ignored: the answer is one line


_CHANGES = {  # routes that change Ollama's library, with their methods and what they would do
    "/api/push": ("POST", "upload one"),
    "/api/create": ("POST", "create others"),
    "/api/copy": ("POST", "copy it; --served-model-name gives it more names"),
    "/api/delete": ("DELETE", "delete it; use `callboard rm MODEL`"),
    "/api/blobs/{digest:path}": ("POST", "store files"),
}


def ollama_model_routes(models: Models, settings: HttpSettings) -> list[Route]:
    lists: dict[str, Any] = {"errors": (503,), "error": OllamaError}
    one: dict[str, Any] = {"errors": (*BODY, 404, 503), "error": OllamaError}
    description = post_json(partial(show, models), settings, may_render=True)

    async def ps(request: HttpRequest) -> Response:
        return json_response(await running(models))

    version = get_json(lambda: OllamaVersion(VERSION))
    fetched = post_json(partial(pull, models), settings)
    return [
        *(
            Route(path, _refusal(what), methods=[method], include_in_schema=False)
            for path, (method, what) in _CHANGES.items()
        ),
        route("/api/pull", fetched, "Whether the model is here", OllamaStatus, (PullRequest,), **one),
        route("/api/tags", get_json(partial(tags, models)), "The models, in Ollama's form", OllamaModels, **lists),
        route("/api/ps", ps, "The models with an engine", OllamaModels, **lists),
        route("/api/show", description, "A model, in Ollama's form", OllamaModel, (ShowRequest,), **one),
        route("/api/version", version, "The version of Ollama's API", OllamaVersion, error=OllamaError),
    ]


def tags(models: Models) -> dict[str, Any]:
    """Return the models that a request may name; raises ApiError while the service is loading."""
    return {"models": [_entry(models, card) for card in models.model_cards()]}


async def running(models: Models) -> dict[str, Any]:
    """Return the models with an engine, and when each sleeps if no request comes."""
    found = []
    for service in models:
        cards, remaining_s = service.model_cards(), await service.sleep.remaining_s()
        if remaining_s is not None:
            stays = {"expires_at": _time(time.time() + remaining_s), "size_vram": 0}
            found += [_entry(models, card) | stays | {"context_length": card.max_model_len} for card in cards]
    return {"models": found}


def pull(models: Models, body: bytes) -> OllamaStatus:
    """Return success for the served model, which clients fetch before they use it; raises FieldError or ApiError."""
    request = parse(PullRequest, body)
    name = request.model if request.model is not None else request.name
    try:
        models.model_card(name)
    except ApiError as e:
        if e.status != 404:
            raise
        text = f"{str(e).rstrip('.')}, and it fetches no others; run `callboard serve` with that model."
        raise ApiError(404, text, param="model", code=e.code) from e
    return OllamaStatus("success")


def _refusal(what: str) -> Handler:
    async def refuse(request: HttpRequest) -> Response:
        raise ApiError(400, f"This server has the model that it was started with, and cannot {what}.")

    return refuse


def _time(seconds: float) -> str:
    """Return a time in RFC 3339; a very late one stands for never."""
    if seconds >= _LAST:
        return "9999-12-31T23:59:59Z"
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def show(models: Models, body: bytes) -> dict[str, Any]:
    """Return the facts about a model; raises FieldError or ApiError."""
    request = parse(ShowRequest, body)
    name = request.model if request.model is not None else request.name
    card, model = models.model_card(name), models.named(name)
    chats, capabilities = model.chats, ["completion"] if model.info.makes_text else []
    if model.info.pooling is not None:
        capabilities.append("embedding")
    if chats is not None and chats.tool_call_format is not None:
        capabilities.append("tools")
    if chats is not None and chats.thinks:
        capabilities.append("thinking")
    if model.images is not None:
        capabilities.append("vision")
    entry = _entry(models, card)
    return {
        "modelfile": f"FROM {model.name}",
        "parameters": "",
        "template": model.tokenizer.chat_template or "",
        "details": entry["details"],
        "model_info": {
            "general.architecture": _ARCHITECTURE,
            "general.basename": model.name,
            f"{_ARCHITECTURE}.context_length": model.info.max_model_len,
            f"{_ARCHITECTURE}.vocab_size": model.info.vocab_size,
        },
        "capabilities": capabilities,
        "modified_at": entry["modified_at"],
    }


def _entry(models: Models, card: ModelCard) -> dict[str, Any]:
    """Return a model of a list. A front does not know its family or its size in bytes."""
    model = models.named(card.id)
    return {
        "name": card.id,
        "model": card.id,
        "modified_at": _time(card.created),
        "size": 0,
        "digest": model.info.fingerprint + model.adapter,
        "details": {
            "parent_model": card.parent or "",
            "format": "",
            "family": _ARCHITECTURE,
            "families": [_ARCHITECTURE],
            "parameter_size": "",
            "quantization_level": card.weights,
        },
    }
