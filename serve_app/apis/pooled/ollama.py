"""POST /api/embed and /api/embeddings: embeddings in Ollama's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic import model_validator

from runtime.output.vectors import embedding
from serve_app.apis.ollama.answers import OllamaOperation
from serve_app.apis.pooled.endpoint import EmbeddingsEndpoint, PreparedPooling
from serve_app.apis.pooled.request import EmbeddingRequest
from serve_app.protocol.answers import encode_json
from serve_app.protocol.operation import WHOLE_ANSWERS


class OllamaEmbeddings(msgspec.Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(msgspec.Struct):
    embedding: list[float]


class OllamaEmbedRequest(EmbeddingRequest):
    """POST /api/embed."""

    truncate: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _cut_to_the_context(cls, value: Any) -> Any:
        is_cut = isinstance(value, dict) and value.get("truncate") is not False
        return {"truncate_prompt_tokens": -1, **value} if is_cut else value


class OllamaEmbeddingRequest(OllamaEmbedRequest):
    """POST /api/embeddings, the older route."""

    input: Any = None  # Ollama's field is `prompt`
    prompt: str

    def inputs(self) -> Sequence[str | list[int]]:
        return [self.prompt]

    def count(self) -> tuple[str, int]:
        return "prompt", 1


class OllamaEmbedEndpoint(EmbeddingsEndpoint):
    """Vectors of one text or several."""

    paths, request_type = ("/api/embed",), OllamaEmbedRequest
    operation = OllamaOperation(
        "Vectors of texts, in Ollama's form", OllamaEmbeddings, (OllamaEmbedRequest,), WHOLE_ANSWERS
    )

    def answer(self, prepared: PreparedPooling[EmbeddingRequest], pooled: Sequence[bytes]) -> bytes:
        vectors = [embedding(p, prepared.pooling, prepared.request.dimensions).tolist() for p in pooled]
        num_tokens = sum(request.prompt_len for request in prepared.requests)
        durations = {"total_duration": 0, "load_duration": 0, "prompt_eval_count": num_tokens}
        return encode_json({"model": prepared.model.name, "embeddings": vectors, **durations})


class OllamaEmbeddingEndpoint(EmbeddingsEndpoint):
    """The vector of one text."""

    paths, request_type = ("/api/embeddings",), OllamaEmbeddingRequest
    operation = OllamaOperation(
        "The vector of a text, in Ollama's form", OllamaEmbedding, (OllamaEmbeddingRequest,), WHOLE_ANSWERS
    )

    def answer(self, prepared: PreparedPooling[EmbeddingRequest], pooled: Sequence[bytes]) -> bytes:
        return encode_json({"embedding": embedding(pooled[0], prepared.pooling).tolist()})
