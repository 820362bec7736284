"""GET /api/tags, /api/ps and /api/version and POST /api/show: what Ollama's clients read before they ask."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from runtime.output.fields import invalid
from serve_app.protocol.parsing import parse
from serve_app.protocol.shapes import RequestModel

if TYPE_CHECKING:
    from serve_app.service.service import Service

# Clients refuse versions in which a route or a field was missing; this one has all that Callboard answers.
VERSION = "0.12.11"
_ARCHITECTURE = "callboard"  # the head of the keys of `model_info`


class ShowRequest(RequestModel):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None  # the older field
    verbose: bool | None = None

    def check(self) -> None:
        if self.model is None and self.name is None:
            raise invalid("model", "is missing; it is required")


def tags(service: Service) -> dict[str, Any]:
    """The models that a request may ask for; raises ApiError while the service is loading."""
    return {"models": [_entry(service, card) for card in service.model_cards()]}


def running(service: Service) -> dict[str, Any]:
    """The same models: all are loaded, and stay so."""
    stays = {"expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}
    return {"models": [_entry(service, card) | stays for card in service.model_cards()]}


def version() -> dict[str, str]:
    """The version of Ollama whose routes these are."""
    return {"version": VERSION}


def show(service: Service, body: bytes) -> dict[str, Any]:
    """What is known of a model; raises FieldError or ApiError."""
    request = parse(ShowRequest, body)
    name = request.model if request.model is not None else request.name
    card, model = service.model_card(name), service.named(name)
    chats, capabilities = model.chats, ["completion"] if model.info.makes_text else []
    if model.info.pooling is not None:
        capabilities.append("embedding")
    if chats is not None and chats.tool_call_format is not None:
        capabilities.append("tools")
    if chats is not None and chats.thinks:
        capabilities.append("thinking")
    entry = _entry(service, card)
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


def _entry(service: Service, card: dict[str, Any]) -> dict[str, Any]:
    """A model of a list. A front does not know its family or its size in bytes."""
    model = service.named(card["id"])
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z"),
        "size": 0,
        "digest": model.info.fingerprint + model.adapter,
        "details": {
            "parent_model": card["parent"] or "",
            "format": "",
            "family": _ARCHITECTURE,
            "families": [_ARCHITECTURE],
            "parameter_size": "",
            "quantization_level": card["weights"],
        },
    }
