"""All APIs: a new one is a folder next to this file and a line in `api_routes`."""

from __future__ import annotations

from typing import Any

from starlette.routing import Route

from serve_app.apis.anthropic.count_tokens import count_tokens_route
from serve_app.apis.anthropic.endpoint import MessagesEndpoint
from serve_app.apis.batches.routes import batch_routes
from serve_app.apis.batches.worker import Batches
from serve_app.apis.chat.endpoint import CHAT
from serve_app.apis.completions.endpoint import COMPLETIONS
from serve_app.apis.llama_cpp.endpoint import LLAMA_CPP_ENDPOINTS
from serve_app.apis.llama_cpp.routes import llama_cpp_routes
from serve_app.apis.management.adapters import adapter_routes
from serve_app.apis.management.engine import Kill, engine_routes
from serve_app.apis.management.requests import request_routes
from serve_app.apis.management.status import status_routes
from serve_app.apis.management.tokenization import tokenization_routes
from serve_app.apis.management.weights import weight_routes
from serve_app.apis.ollama.endpoint import OllamaChatEndpoint, OllamaGenerateEndpoint
from serve_app.apis.ollama.models import ollama_model_routes
from serve_app.apis.pooled.routes import pooled_routes
from serve_app.apis.responses.routes import response_routes
from serve_app.apis.responses.store import StoredResponses
from serve_app.protocol.operation import ApiRoute
from serve_app.service.endpoint import Endpoint
from serve_app.service.generation import Generation
from serve_app.service.models import Models
from serve_app.service.recorded import RecordedRequests
from serve_app.settings import HttpSettings

ENDPOINTS: tuple[Endpoint[Any], ...] = (
    COMPLETIONS,
    CHAT,
    MessagesEndpoint(),
    OllamaChatEndpoint(),
    OllamaGenerateEndpoint(),
    *LLAMA_CPP_ENDPOINTS,
)


def api_routes(
    models: Models, settings: HttpSettings, stored: StoredResponses, batches: Batches, kill: Kill | None
) -> list[Route]:
    recorded = RecordedRequests(settings.recorded_request_bytes, [endpoint.id_prefix for endpoint in ENDPOINTS])
    return [
        *(ApiRoute(e.path, Generation(models, e, settings, recorded), e.operation) for e in ENDPOINTS),
        count_tokens_route(models, settings),
        *response_routes(models, settings, stored, recorded),
        *pooled_routes(models, settings),
        *batch_routes(settings, batches),
        *ollama_model_routes(models, settings),
        *llama_cpp_routes(models, settings),
        *tokenization_routes(models, settings),
        *request_routes(models, settings, recorded),
        *status_routes(models, settings),
        *adapter_routes(models, settings),
        *engine_routes(models, settings, kill),
        *weight_routes(models, settings),
    ]
