"""The HTTP of requests for vectors and scores."""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from runtime.base.model.pooling import POOLED
from runtime.base.types import Request
from runtime.output.fields import invalid
from serve_app.apis.pooled.endpoint import POOLED_ENDPOINTS, PooledEndpoint, PooledPrompt, PreparedPooling
from serve_app.apis.pooled.llama_cpp import LlamaEmbeddingEndpoint
from serve_app.apis.pooled.ollama import OllamaEmbeddingEndpoint, OllamaEmbedEndpoint
from serve_app.apis.pooled.request import PoolingKind
from serve_app.http.auth import clean_id
from serve_app.http.lanes import run_preparation, run_rendering
from serve_app.http.limits import Deadline, check_priority, read_json_body
from serve_app.observability.context import RequestContext
from serve_app.protocol.errors import ApiError
from serve_app.protocol.operation import ApiRoute
from serve_app.protocol.parsing import parse
from serve_app.service.checks import MAX_PROMPT_TOKENS
from serve_app.service.generation import UntilClientLeaves
from serve_app.service.models import Models
from serve_app.service.service import owned
from serve_app.settings import HttpSettings

_MANY_NUMBERS = 1 << 14  # slow to encode as JSON


def pooled_routes(models: Models, settings: HttpSettings) -> list[Route]:
    """Return all endpoints' routes; the OpenAPI document leaves out aliases."""
    routes: list[Route] = []
    for endpoint in (*POOLED_ENDPOINTS, OllamaEmbedEndpoint(), OllamaEmbeddingEndpoint(), LlamaEmbeddingEndpoint()):
        handlers = [PooledRoute(models, endpoint, settings) for _ in endpoint.paths]  # metrics count by handler
        routes.append(ApiRoute(endpoint.paths[0], handlers[0], endpoint.operation))
        for path, handler in zip(endpoint.paths[1:], handlers[1:], strict=True):
            routes.append(Route(path, handler, methods=["POST"], include_in_schema=False))
    return routes


class PooledRoute:
    """POST of one endpoint."""

    def __init__(self, models: Models, endpoint: PooledEndpoint[Any], settings: HttpSettings) -> None:
        self._models, self._endpoint, self._settings = models, endpoint, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext.of(scope)
        body = await read_json_body(scope, receive, self._settings)
        if body is None:
            return
        prepared: PreparedPooling[Any] | None = None
        async with UntilClientLeaves(receive, send):
            prepare = partial(self._prepared, body, scope)
            prepared = await run_preparation(body, scope["owner"], _may_be_chat(body), prepare)
        if prepared is None:
            return
        context.model, context.ignored_fields = prepared.model.name, prepared.request.ignored_fields()
        async with UntilClientLeaves(receive, send) as send:
            async with Deadline(self._settings.request_timeout_s):
                pooled = await self._models.pool(prepared.model, prepared.id, prepared.requests, context)
            answer = partial(self._endpoint.answer, prepared, pooled)
            is_long = len(body) + sum(map(len, pooled)) > 4 * _MANY_NUMBERS  # an answer may repeat the texts
            content = await run_rendering(is_long, scope["owner"], answer)
            headers = [*prepared.headers(), (b"content-length", b"%d" % len(content))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": content})

    def _prepared(self, body: bytes, scope: Scope) -> PreparedPooling[Any]:
        """Pure CPU work and thread-safe; raises FieldError or ApiError."""
        endpoint = self._endpoint
        is_chat = _may_be_chat(body) and parse(PoolingKind, body).messages is not None
        kind: Any = endpoint.operation.requests[-1] if is_chat else endpoint.request_type
        request = parse(kind, body)
        check_priority(request.priority, self._settings)
        model = self._models.computing(request.model)
        if (pooling := model.info.pooling) is None:
            text = "This model makes text, not vectors; its operator can start it with --pooling last or mean."
            raise ApiError(400, text, param="model", code="model_not_supported")
        where, count = request.count()
        if count > (most := self._settings.max_prompts):
            raise invalid(where, f"has {count} texts, but this server allows {most}")
        prompts: list[PooledPrompt] = []
        num_tokens = 0
        for prompt in endpoint.prompts(request, model, pooling):
            prompts.append(prompt)
            num_tokens += len(prompt.token_ids)
            if num_tokens > MAX_PROMPT_TOKENS:  # before the other texts are tokenised
                prompts.clear()  # since the error keeps this frame until the event loop has answered
                text = f"The request has over {MAX_PROMPT_TOKENS} tokens, which is the limit; send fewer texts at once."
                raise ApiError(400, text)
        request_id = clean_id(request.request_id or scope["request_id"]) or secrets.token_hex(12)
        name = endpoint.id_prefix + request_id
        priority, salt = request.priority, request.cache_salt or ""
        requests = [
            Request(
                f"{owned(name, scope['owner'])}-{i}",
                ids,
                len(ids),
                POOLED,
                priority=priority,
                cache_salt=salt,
                adapter=model.adapter,
                images=images,
            )
            for i, (ids, images) in enumerate(prompts)
        ]
        return PreparedPooling(name, request, model, pooling, requests)


def _may_be_chat(body: bytes) -> bool:
    """Return whether a request may have messages, which the event loop never renders."""
    return b'"messages"' in body
