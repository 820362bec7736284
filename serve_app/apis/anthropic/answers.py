"""The answers of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from msgspec import Struct

from serve_app.protocol.operation import Operation


class CacheCreation(Struct):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(Struct):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
    cache_read_input_tokens: int
    output_tokens: int


class AnsweredMessage(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class CountedTokens(Struct):
    input_tokens: int
    max_model_len: int


class MessagesErrorObject(Struct):
    type: str
    message: str


class MessagesError(Struct):
    type: Literal["error"]
    error: MessagesErrorObject


MessagesOperation = partial(Operation, error=MessagesError)
