"""POST /embedding: embeddings in llama.cpp's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from pydantic import model_validator

from runtime.output.vectors import embedding
from serve_app.apis.llama_cpp.answers import LlamaOperation
from serve_app.apis.pooled.endpoint import EmbeddingsEndpoint, PreparedPooling
from serve_app.apis.pooled.request import EmbeddingRequest
from serve_app.protocol.answers import encode_json
from serve_app.protocol.operation import WHOLE_ANSWERS
from serve_app.protocol.shapes import only


class LlamaEmbedding(msgspec.Struct):
    index: int
    embedding: list[list[float]]


class LlamaEmbeddingRequest(EmbeddingRequest):
    """POST /embedding; `content` is its name for `input`."""

    embd_normalize: Annotated[int | None, only(None, 2, remedy="the model decides the length; leave it out")] = None

    @model_validator(mode="before")
    @classmethod
    def _with_input(cls, value: Any) -> Any:
        if isinstance(value, dict) and "content" in value and "input" not in value:
            return {("input" if name == "content" else name): each for name, each in value.items()}
        return value


class LlamaEmbeddingEndpoint(EmbeddingsEndpoint):
    """Vectors for one text or several, each in its own list."""

    paths, request_type = ("/embedding", "/embeddings"), LlamaEmbeddingRequest
    operation = LlamaOperation(
        "Vectors of texts, in llama.cpp's form", list[LlamaEmbedding], (LlamaEmbeddingRequest,), WHOLE_ANSWERS
    )

    def answer(self, prepared: PreparedPooling[EmbeddingRequest], pooled: Sequence[bytes]) -> bytes:
        vectors = (embedding(p, prepared.pooling, prepared.request.dimensions).tolist() for p in pooled)
        return encode_json([{"index": i, "embedding": [vector]} for i, vector in enumerate(vectors)])
