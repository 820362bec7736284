"""Answers for llama.cpp's routes. A completion's field may be missing if the request names others."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from msgspec import Struct

from serve_app.protocol.operation import Operation


class LlamaText(Struct):
    index: int
    content: str
    tokens: list[int]
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool
    stop_type: Literal["none", "eos", "limit", "word"]
    stopping_word: str
    has_new_line: bool
    generation_settings: dict[str, Any]
    timings: dict[str, float]


class LlamaProps(Struct):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: dict[str, bool]
    build_info: str
    is_sleeping: bool


class LlamaSlot(Struct):
    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class LlamaPrompt(Struct):
    prompt: str


class LlamaErrorObject(Struct):
    code: int
    message: str
    type: str


class LlamaError(Struct):
    error: LlamaErrorObject


LlamaOperation = partial(Operation, error=LlamaError)
