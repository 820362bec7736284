"""The answers of Ollama's routes."""

from __future__ import annotations

from functools import partial
from typing import Any

from msgspec import Struct

from serve_app.protocol.operation import Operation


class _Line(Struct):
    model: str
    created_at: str
    done: bool


class OllamaChatLine(_Line):
    message: dict[str, Any]
    done_reason: str | None = None


class OllamaText(_Line):
    response: str
    done_reason: str | None = None


class OllamaModels(Struct):
    models: list[dict[str, Any]]


class OllamaModel(Struct):
    template: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]


class OllamaVersion(Struct):
    version: str


class OllamaStatus(Struct):
    status: str


class OllamaError(Struct):
    error: str


OllamaOperation = partial(Operation, error=OllamaError)
