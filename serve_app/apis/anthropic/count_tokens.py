"""POST /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial

from starlette.routing import Route

from serve_app.apis.anthropic.answers import CountedTokens, MessagesOperation
from serve_app.apis.anthropic.request import CountTokensRequest
from serve_app.apis.chat.endpoint import CHAT
from serve_app.http.json_routes import post_json
from serve_app.protocol.operation import BODY, ApiRoute
from serve_app.protocol.parsing import parse
from serve_app.service.models import Models
from serve_app.settings import HttpSettings

_OPERATION = MessagesOperation(
    "The number of tokens of a message's prompt", CountedTokens, (CountTokensRequest,), (*BODY, 404, 503)
)


def count_tokens_route(models: Models, settings: HttpSettings) -> Route:
    answer = partial(count_tokens, models)
    return ApiRoute("/v1/messages/count_tokens", post_json(answer, settings, may_render=True), _OPERATION)


def count_tokens(models: Models, body: bytes) -> CountedTokens:
    """Return the length of a message's prompt; raises FieldError or ApiError."""
    request = parse(CountTokensRequest, body).as_chat()
    model = models.named(request.model)
    return CountedTokens(len(CHAT.prompt(request, model).token_ids), model.info.max_model_len)
