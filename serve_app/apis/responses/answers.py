"""The answers of /v1/responses and its stored responses."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class ResponseUsage(Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class ResponseObject(Struct):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    system_fingerprint: str
    seed: int
    output: list[dict[str, Any]]
    usage: ResponseUsage | None


class CountedInput(Struct, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
    max_model_len: int


class DeletedResponse(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool
