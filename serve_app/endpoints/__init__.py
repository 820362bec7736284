"""The ways of asking the model, one class each."""

from typing import Any

from serve_app.endpoints.chat import ChatEndpoint
from serve_app.endpoints.completions import CompletionsEndpoint
from serve_app.endpoints.endpoint import Endpoint
from serve_app.endpoints.messages import MessagesEndpoint
from serve_app.endpoints.ollama import OllamaChatEndpoint, OllamaGenerateEndpoint

CHAT, COMPLETIONS = ChatEndpoint(), CompletionsEndpoint()
ENDPOINTS: tuple[Endpoint[Any], ...] = (
    COMPLETIONS,
    CHAT,
    MessagesEndpoint(),
    OllamaChatEndpoint(),
    OllamaGenerateEndpoint(),
)

__all__ = ["CHAT", "COMPLETIONS", "ENDPOINTS", "Endpoint"]
