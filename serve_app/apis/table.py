"""The ways of asking the model, one class each."""

from typing import Any

from serve_app.apis.anthropic.endpoint import MessagesEndpoint
from serve_app.apis.chat.endpoint import ChatEndpoint
from serve_app.apis.completions.endpoint import CompletionsEndpoint
from serve_app.apis.ollama.endpoint import OllamaChatEndpoint, OllamaGenerateEndpoint
from serve_app.service.endpoint import Endpoint

CHAT, COMPLETIONS = ChatEndpoint(), CompletionsEndpoint()
ENDPOINTS: tuple[Endpoint[Any], ...] = (
    COMPLETIONS,
    CHAT,
    MessagesEndpoint(),
    OllamaChatEndpoint(),
    OllamaGenerateEndpoint(),
)

__all__ = ["CHAT", "COMPLETIONS", "ENDPOINTS", "Endpoint"]
