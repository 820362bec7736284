"""POST /tokenize, POST /detokenize and GET /tokenizer_info, in the shapes that vLLM gave them, and Anthropic's
POST /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from runtime.output.fields import invalid
from serve_app.apis.anthropic.request import CountTokensRequest
from serve_app.apis.chat.request import ChatRequest
from serve_app.apis.table import CHAT
from serve_app.protocol.parsing import parse
from serve_app.protocol.prompt_ids import prompt_ids
from serve_app.protocol.shapes import RequestModel, TokenId
from serve_app.service.service import Service

MAX_IDS = 1 << 18  # to detokenize at once; more if the model's context is longer


class TokenizeTextRequest(RequestModel):
    """POST /tokenize of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatRequest):
    """POST /tokenize of a chat: what its prompt would be. The fields that say how to sample are ignored."""

    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    """POST /detokenize."""

    token_ids_field: ClassVar[str | None] = "tokens"

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20, fail_fast=True)]


class _Kind(RequestModel):
    """Only tells the two kinds of POST /tokenize apart."""

    messages: Any = None


def tokenize(service: Service, body: bytes) -> dict[str, Any]:
    """The token ids of a text or of a chat's prompt; raises FieldError or ApiError."""
    request: TokenizeTextRequest | TokenizeChatRequest
    if parse(_Kind, body).messages is None:
        request = parse(TokenizeTextRequest, body)
        model = service.named(request.model)
        special, limit = request.add_special_tokens, model.info.max_model_len
        ids = prompt_ids(model.tokenizer, request.prompt, special, limit, "prompt")
    else:
        request = parse(TokenizeChatRequest, body)
        model = service.named(request.model)
        ids, _ = CHAT.prompt(request, model)
    names = [model.tokenizer.id_to_token(i) for i in ids] if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": model.info.max_model_len, "tokens": ids, "token_strs": names}


def count_tokens(service: Service, body: bytes) -> dict[str, Any]:
    """The length of a message's prompt; raises FieldError or ApiError."""
    request = parse(CountTokensRequest, body).as_chat()
    return {"input_tokens": len(CHAT.prompt(request, service.named(request.model))[0])}


def detokenize(service: Service, body: bytes) -> dict[str, Any]:
    """The text of token ids, special tokens included; raises FieldError or ApiError."""
    request = parse(DetokenizeRequest, body)
    model = service.named(request.model)
    if len(request.tokens) > max(MAX_IDS, model.info.max_model_len):
        raise invalid("tokens", f"has {len(request.tokens)} ids; at most {MAX_IDS} are allowed")
    size = model.tokenizer.vocab_size
    if (largest := max(request.tokens, default=0)) >= size:
        raise invalid("tokens", f"holds the token id {largest}, but the ids of this model end at {size - 1}")
    return {"prompt": model.tokenizer.decode(request.tokens, skip_special_tokens=False)}


def tokenizer_info(service: Service) -> dict[str, Any]:
    """The facts that a client needs to render chats by itself, named as in a tokenizer_config.json."""
    model = service.named(None)
    return model.tokenizer.settings(model.info.max_model_len)
