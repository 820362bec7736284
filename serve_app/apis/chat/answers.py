"""The answer of /v1/chat/completions."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from serve_app.apis.completions.answers import AnswerFields, ChoiceFields


class AnswerMessage(Struct):
    role: Literal["assistant"]
    content: str | None


class ChatChoice(ChoiceFields):
    message: AnswerMessage


class ChatCompletion(AnswerFields):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
