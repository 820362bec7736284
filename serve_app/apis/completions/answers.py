"""Answers for /v1/completions and, by their shared parts, for /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from runtime.output.processor import WeightSpan


class CompletionTokensDetails(Struct):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails | None = None  # only with speculation


class AnswerFields(Struct):
    """The fields that every answer in OpenAI's shape has."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class ChoiceFields(Struct, kw_only=True):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    seed: int
    weight_versions: list[WeightSpan] | None = None  # None without weight_updates
    routed_experts: str | None = None  # a .npy file as base64, if requested


class CompletionChoice(ChoiceFields):
    text: str


class TextCompletion(AnswerFields):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
