"""The ways of asking the model, one class each."""

from typing import Any

from serve_app.endpoints.chat import ChatEndpoint
from serve_app.endpoints.completions import CompletionsEndpoint
from serve_app.endpoints.endpoint import Endpoint

CHAT, COMPLETIONS = ChatEndpoint(), CompletionsEndpoint()
ENDPOINTS: tuple[Endpoint[Any], ...] = (COMPLETIONS, CHAT)

__all__ = ["CHAT", "COMPLETIONS", "ENDPOINTS", "Endpoint"]
