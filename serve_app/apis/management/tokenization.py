"""POST /tokenize, POST /detokenize and GET /tokenizer_info, in vLLM's shapes and llama.cpp's."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.routing import Route

from runtime.output.fields import invalid
from serve_app.apis.chat.endpoint import CHAT
from serve_app.apis.chat.request import ChatRequest
from serve_app.apis.management.answers import ContentTokens, Detokenized, Tokenized, TokenizerInfo
from serve_app.http.json_routes import get_json, post_json
from serve_app.protocol.operation import BODY, route
from serve_app.protocol.parsing import parse
from serve_app.protocol.prompt_ids import prompt_ids
from serve_app.protocol.shapes import RequestModel, TokenId
from serve_app.service.models import Models
from serve_app.settings import HttpSettings

MAX_IDS = 1 << 18  # ids in one /detokenize, unless the model's context is longer


class TokenizeTextRequest(RequestModel):
    """POST /tokenize of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeContentRequest(RequestModel):
    """POST /tokenize of a text, as llama.cpp has it."""

    model: str | None = None
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class TokenizeChatRequest(ChatRequest):
    """POST /tokenize of a chat. Sampling fields are ignored."""

    return_token_strs: bool | None = None


class DetokenizeRequest(RequestModel):
    """POST /detokenize."""

    token_ids_field: ClassVar[str | None] = "tokens"

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20, fail_fast=True)]


class _Kind(RequestModel):
    """The fields that distinguish the kinds of POST /tokenize."""

    messages: Any = None
    content: Any = None


def tokenization_routes(models: Models, settings: HttpSettings) -> list[Route]:
    to_ids = post_json(partial(tokenize, models), settings, may_render=True)
    to_text = post_json(partial(detokenize, models), settings)
    info = get_json(partial(tokenizer_info, models))
    kinds = TokenizeTextRequest, TokenizeChatRequest, TokenizeContentRequest
    errors = (*BODY, 404, 503)
    return [
        route(
            "/tokenize",
            to_ids,
            "The token ids of a text or of a chat's prompt",
            Tokenized,
            kinds,
            errors,
            others=(ContentTokens,),
        ),
        route("/detokenize", to_text, "The text of token ids", Detokenized, (DetokenizeRequest,), errors),
        route("/tokenizer_info", info, "The tokenizer's settings", TokenizerInfo, errors=(503,)),
    ]


def tokenize(models: Models, body: bytes) -> Tokenized | ContentTokens:
    """Return the token ids of a text or a chat's prompt; raises FieldError or ApiError."""
    request: TokenizeTextRequest | TokenizeChatRequest
    kind = parse(_Kind, body)
    if kind.content is not None and kind.messages is None:
        return _content_tokens(models, parse(TokenizeContentRequest, body))
    if kind.messages is None:
        request = parse(TokenizeTextRequest, body)
        model = models.named(request.model)
        special, limit = request.add_special_tokens, model.info.max_model_len
        ids = prompt_ids(model.tokenizer.encode, request.prompt, special, limit, "prompt")
    else:
        request = parse(TokenizeChatRequest, body)
        model = models.named(request.model)
        ids = CHAT.prompt(request, model).token_ids
    names = [model.tokenizer.id_to_token(i) for i in ids] if request.return_token_strs else None
    return Tokenized(len(ids), model.info.max_model_len, ids, names)


def _content_tokens(models: Models, request: TokenizeContentRequest) -> ContentTokens:
    model = models.named(request.model)
    tokenizer, limit = model.tokenizer, model.info.max_model_len
    encode = tokenizer.encode if request.parse_special else tokenizer.encode_contents
    ids = prompt_ids(encode, request.content, request.add_special, limit, "content")
    if not request.with_pieces:
        return ContentTokens(ids)
    return ContentTokens([{"id": i, "piece": _piece(tokenizer.token_bytes(i))} for i in ids])


def _piece(piece: bytes) -> str | list[int]:
    """Return a token's text, or its bytes if these are a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def detokenize(models: Models, body: bytes) -> Detokenized:
    """Return the text of token ids with special tokens; raises FieldError or ApiError."""
    request = parse(DetokenizeRequest, body)
    model = models.named(request.model)
    if len(request.tokens) > max(MAX_IDS, model.info.max_model_len):
        raise invalid("tokens", f"has {len(request.tokens)} ids; at most {MAX_IDS} are allowed")
    size = model.tokenizer.vocab_size
    if (largest := max(request.tokens, default=0)) >= size:
        raise invalid("tokens", f"holds the token id {largest}, but the ids of this model end at {size - 1}")
    text = model.tokenizer.decode(request.tokens, skip_special_tokens=False)
    return Detokenized(text, text)


def tokenizer_info(models: Models) -> dict[str, Any]:
    """Return the settings that a client needs to render chats itself, named as in tokenizer_config.json."""
    model = models.named(None)
    return model.tokenizer.settings(model.info.max_model_len)
