"""Endpoints for vectors and scores of prompts: /v1/embeddings, /pooling, /score and /rerank."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from runtime.base.images import ImageSpan
from runtime.base.model.pooling import Pooling
from runtime.base.types import Request
from runtime.output.fields import invalid
from runtime.output.score_prompt import PairPrompter, Part, encoder_of
from runtime.output.vectors import embedding, scores, texts_of
from serve_app.apis.chat.endpoint import CHAT
from serve_app.apis.pooled.answers import Embeddings, Pooled, Ranking, Scores
from serve_app.apis.pooled.request import (
    EmbeddingChatRequest,
    EmbeddingRequest,
    PooledFields,
    PoolingChatRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from serve_app.protocol.answers import encode_json
from serve_app.protocol.errors import ApiError
from serve_app.protocol.operation import WHOLE_ANSWERS, Operation
from serve_app.protocol.prepared_request import ServedModel
from serve_app.protocol.prompt_ids import prompt_ids

P = TypeVar("P", bound=PooledFields)


@dataclass(frozen=True, slots=True)
class PreparedPooling(Generic[P]):
    """A checked and tokenised request for vectors, with an engine request for each prompt."""

    id: str
    request: P
    model: ServedModel
    pooling: Pooling
    requests: list[Request]

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the content type, and facts that the body omits."""
        headers = [
            (b"content-type", b"application/json"),
            (b"x-callboard-system-fingerprint", self.model.fingerprint.encode()),
        ]
        if ignored := self.request.ignored_fields():
            headers.append((b"x-callboard-ignored-fields", ", ".join(ignored).encode()))
        return headers

    def body(self, kind: str, **fields: Any) -> bytes:
        """Return an answer with the fields that all share."""
        num_tokens = sum(request.prompt_len for request in self.requests)
        head = {"id": self.id, "object": kind, "created": int(time.time()), "model": self.model.name}
        return encode_json({**head, **fields, "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}})


class PooledPrompt(NamedTuple):
    """A prompt to pool."""

    token_ids: list[int]
    images: tuple[ImageSpan, ...] = ()


class PooledEndpoint(ABC, Generic[P]):
    """One kind of request, listed in POOLED_ENDPOINTS."""

    paths: ClassVar[tuple[str, ...]]  # the first is documented, the others are aliases
    operation: ClassVar[Operation]  # its last kind of requests is the one with messages
    request_type: type[P]
    id_prefix: ClassVar[str]

    @abstractmethod
    def prompts(self, request: P, model: ServedModel, pooling: Pooling) -> Iterator[PooledPrompt]:
        """Yield each prompt; raises FieldError or ApiError."""

    @abstractmethod
    def answer(self, prepared: PreparedPooling[P], pooled: Sequence[bytes]) -> bytes:
        """Return the answer; `pooled` has the engine's result for each prompt."""


class PoolingEndpoint(PooledEndpoint[PoolingRequest]):
    """The model's vectors: embeddings, or the logits of a classifier's labels."""

    paths, request_type, id_prefix = ("/pooling",), PoolingRequest, "pool-"
    operation = Operation(
        "Vectors of texts as the model makes them", Pooled, (PoolingRequest, PoolingChatRequest), WHOLE_ANSWERS
    )

    def prompts(self, request: PoolingRequest, model: ServedModel, pooling: Pooling) -> Iterator[PooledPrompt]:
        if isinstance(request, PoolingChatRequest):
            yield _chat_prompt(request, model)
            return
        given = request.inputs()
        for at, value in enumerate(given):
            yield _input_ids(request, value, model, "input" if len(given) == 1 else f"input.{at}")

    def answer(self, prepared: PreparedPooling[PoolingRequest], pooled: Sequence[bytes]) -> bytes:
        encode, pooling = _encoding(prepared.request.encoding_format), prepared.pooling
        vectors = (np.frombuffer(p, np.float32) if pooling.num_labels else embedding(p, pooling) for p in pooled)
        data = [{"object": "pooling", "index": i, "data": encode(v)} for i, v in enumerate(vectors)]
        return prepared.body("list", data=data)


class EmbeddingsEndpoint(PooledEndpoint[EmbeddingRequest]):
    """OpenAI's embeddings."""

    paths: ClassVar[tuple[str, ...]] = ("/v1/embeddings",)
    id_prefix = "embd-"
    request_type: type[EmbeddingRequest] = EmbeddingRequest
    operation = Operation(
        "Vectors of texts, or of a chat", Embeddings, (EmbeddingRequest, EmbeddingChatRequest), WHOLE_ANSWERS
    )

    def prompts(self, request: EmbeddingRequest, model: ServedModel, pooling: Pooling) -> Iterator[PooledPrompt]:
        if pooling.num_labels:
            raise ApiError(400, "This model makes scores, not embeddings; use /v1/rerank or /v1/score.", param="model")
        return POOLING.prompts(request, model, pooling)

    def answer(self, prepared: PreparedPooling[EmbeddingRequest], pooled: Sequence[bytes]) -> bytes:
        encode, dimensions = _encoding(prepared.request.encoding_format), prepared.request.dimensions
        vectors = (embedding(p, prepared.pooling, dimensions) for p in pooled)
        data = [{"object": "embedding", "index": i, "embedding": encode(v)} for i, v in enumerate(vectors)]
        return prepared.body("list", data=data)


class ScoreEndpoint(PooledEndpoint[ScoreRequest]):
    """Scores for pairs of texts: a classifier's probability, or the embeddings' cosine."""

    paths, request_type, id_prefix = ("/v1/score", "/score"), ScoreRequest, "score-"
    operation = Operation("How well texts match", Scores, (ScoreRequest,), WHOLE_ANSWERS)

    def prompts(self, request: ScoreRequest, model: ServedModel, pooling: Pooling) -> Iterator[PooledPrompt]:
        pairs = request.pairs()
        if pooling.num_labels:
            return _pair_ids(request, pairs, model, pooling, "text_1", "text_2")
        return (_input_ids(request, text, model, "text_1", True) for text in texts_of(pairs))

    def answer(self, prepared: PreparedPooling[ScoreRequest], pooled: Sequence[bytes]) -> bytes:
        found = scores(prepared.request.pairs(), pooled, prepared.pooling)
        return prepared.body(
            "list", data=[{"object": "score", "index": i, "score": value} for i, value in enumerate(found)]
        )


class RerankEndpoint(PooledEndpoint[RerankRequest]):
    """Documents sorted by their scores for a query, the best first."""

    paths, request_type, id_prefix = ("/v1/rerank", "/rerank", "/v2/rerank"), RerankRequest, "rerank-"
    operation = Operation("Documents in the order of a query", Ranking, (RerankRequest,), WHOLE_ANSWERS)

    def prompts(self, request: RerankRequest, model: ServedModel, pooling: Pooling) -> Iterator[PooledPrompt]:
        pairs = [(request.query, text) for text in request.texts()]
        if pooling.num_labels:
            return _pair_ids(request, pairs, model, pooling, "query", "documents")
        return (_input_ids(request, text, model, "documents", True) for text in texts_of(pairs))

    def answer(self, prepared: PreparedPooling[RerankRequest], pooled: Sequence[bytes]) -> bytes:
        request, texts = prepared.request, prepared.request.texts()
        found = scores([(request.query, text) for text in texts], pooled, prepared.pooling)
        best = sorted(range(len(texts)), key=lambda i: -found[i])[: request.top_n or None]
        shows = request.return_documents is not False
        results = [
            {"index": i, "relevance_score": found[i], **({"document": {"text": texts[i]}} if shows else {})}
            for i in best
        ]
        return prepared.body("rerank", results=results)


POOLING = PoolingEndpoint()
POOLED_ENDPOINTS: tuple[PooledEndpoint[Any], ...] = (EmbeddingsEndpoint(), POOLING, ScoreEndpoint(), RerankEndpoint())


# ---- prompts ---------------------------------------------------------------------------------------------------------


def _most(request: PooledFields, model: ServedModel) -> tuple[int, int | None]:
    """Return the longest prompt, one token less than the context, and the length to truncate to or None."""
    limit, length = model.info.max_model_len - 1, request.truncate_prompt_tokens
    return limit, None if length is None else limit if length == -1 else min(length, limit)


def _input_ids(
    request: PooledFields, value: str | list[int], model: ServedModel, where: str, is_content: bool = False
) -> PooledPrompt:
    """Return one input's prompt; raises FieldError or ApiError. Special tokens in contents are plain text.

    A truncated text keeps the special tokens at its end, since a vector is often the last token's."""
    (limit, most), tokenizer = _most(request, model), model.tokenizer
    if isinstance(value, list):
        ids, num_end = value, 0
        if (largest := max(ids, default=0)) >= (size := min(tokenizer.vocab_size, model.info.vocab_size)):
            raise invalid(where, f"holds the token id {largest}, but the ids of this model end at {size - 1}")
    else:
        encode = tokenizer.encode_contents if is_content else tokenizer.encode
        ids = prompt_ids(encode, value, request.add_special_tokens, limit, where, None if most is None else "start")
        num_end = next((n for n, i in enumerate(reversed(ids)) if i not in tokenizer.special_ids), len(ids))
    if not ids:
        raise invalid(where, "is empty; send at least one token")
    if most is not None and len(ids) > most:
        num_end = min(num_end, most - 1) if request.add_special_tokens else 0
        ids = [*ids[: most - num_end], *ids[len(ids) - num_end :]]
    return _checked(ids, limit, where)


def _pair_ids(
    request: ScoreRequest | RerankRequest,
    pairs: list[tuple[str, str]],
    model: ServedModel,
    pooling: Pooling,
    query_field: str,
    document_field: str,
) -> Iterator[PooledPrompt]:
    """Yield the prompts of pairs for a classifier."""
    if pooling.num_labels != 1:
        raise ApiError(400, f"This model's classifier has {pooling.num_labels} labels, not one; use /pooling.")
    limit, most = _most(request, model)

    def encode(text: str, special: bool, part: Part) -> list[int]:
        kept: Literal["start"] | None = None if most is None else "start"
        field = document_field if part in ("document", "rest") else query_field
        return prompt_ids(encoder_of(model.tokenizer, part), text, special, limit, field, kept)

    prompter = PairPrompter(encode, pooling, request.instruction, most)
    for query, text in pairs:
        yield _checked(prompter.ids(query, text), limit, document_field)


def _chat_prompt(request: PoolingChatRequest, model: ServedModel) -> PooledPrompt:
    prompt = CHAT.prompt(request.chat(), model)
    return _checked(prompt.token_ids, _most(request, model)[0], "messages", prompt.images)


def _checked(ids: list[int], limit: int, where: str, images: tuple[ImageSpan, ...] = ()) -> PooledPrompt:
    if len(ids) > limit:
        remedy = "shorten it" if where == "messages" else "shorten it, or send truncate_prompt_tokens"
        raise ApiError(
            400,
            f"This model takes {limit} tokens at once, but {where} has {len(ids)}; {remedy}.",
            param=where,
            code="context_length_exceeded",
        )
    return PooledPrompt(ids, images)


# ---- answers ---------------------------------------------------------------------------------------------------------


def _encoding(name: str) -> Any:
    """Return the function that makes a vector a JSON value: a list of numbers, or their bytes in base64."""
    return np.ndarray.tobytes if name == "base64" else np.ndarray.tolist
