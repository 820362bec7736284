"""The answers of /v1/embeddings, /pooling, /score and /rerank."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class PromptUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class _Answer(Struct):
    id: str
    created: int
    model: str
    usage: PromptUsage


class Embedding(Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(_Answer):
    object: Literal["list"]
    data: list[Embedding]


class PooledData(Struct):
    object: Literal["pooling"]
    index: int
    data: list[float] | str


class Pooled(_Answer):
    object: Literal["list"]
    data: list[PooledData]


class ScoreOfPair(Struct):
    object: Literal["score"]
    index: int
    score: float


class Scores(_Answer):
    object: Literal["list"]
    data: list[ScoreOfPair]


class RankedDocument(Struct):
    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class Ranking(_Answer):
    object: Literal["rerank"]
    results: list[RankedDocument]
