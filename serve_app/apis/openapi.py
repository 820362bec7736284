"""The OpenAPI 3.1 page: requests from the models that check them, answers and errors from the tables below."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from types import GenericAlias
from typing import Any, Literal

from pydantic import BaseModel, create_model
from pydantic.json_schema import models_json_schema

from serve_app.apis.anthropic.request import CountTokensRequest, MessagesRequest
from serve_app.apis.batches.routes import BatchesQuery, CreateBatchRequest, FilesQuery, UploadForm
from serve_app.apis.chat.request import ChatRequest
from serve_app.apis.completions.request import CompletionRequest
from serve_app.apis.management.adapters import LoadAdapterRequest, UnloadAdapterRequest
from serve_app.apis.management.engine import ChaosQuery, SleepQuery
from serve_app.apis.management.tokenization import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from serve_app.apis.ollama.models import ShowRequest
from serve_app.apis.ollama.request import OllamaChatRequest, OllamaGenerateRequest
from serve_app.apis.pooled.request import EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from serve_app.apis.responses.request import ResponsesRequest
from serve_app.apis.responses.routes import InputItemsQuery, RetrieveQuery
from serve_app.protocol.parsing import AbortRequest, GrammarRequest
from serve_app.settings import HttpSettings

# ---- answers: what a client can rely on; each may hold more ---------------------------------------------------------


def _answer(name: str, **types: Any) -> type[BaseModel]:
    fields: dict[str, Any] = {field: kind if isinstance(kind, tuple) else (kind, ...) for field, kind in types.items()}
    return create_model(name, **fields)


def _list_of(model: type[BaseModel]) -> Any:
    return GenericAlias(list, (model,))


Aborted = _answer("Aborted", request_id=str, object=Literal["request.abort"])
Tokenized = _answer("Tokenized", count=int, max_model_len=int, tokens=list[int], token_strs=list[str | None] | None)
Detokenized = _answer("Detokenized", prompt=str)
TokenizerInfo = _answer("TokenizerInfo", tokenizer_class=str, chat_template=str | None, model_max_length=int)
Health = _answer("Health", status=Literal["ok"], phase=(str | None, None))  # only where there is no engine
Ready = _answer("Ready", status=Literal["ready"], phase=(str | None, None))
Killed = _answer("Killed", object=Literal["chaos.kill"], role=str, engine=str, pid=int)
CheckedGrammar = _answer("CheckedGrammar", object=Literal["grammar.check"], ignored=list[str])
Sleeping = _answer("Sleeping", is_sleeping=bool)
Load = _answer("Load", server_load=int)
ServerInfo = _answer(
    "ServerInfo",
    version=str,
    model=str,
    max_model_len=int,
    dtype=str,
    system_fingerprint=str,
    sampling=dict[str, float],  # the defaults of the model's makers
    allow_chaos=bool,
)
Version = _answer("Version", version=str)
Document = _answer("Document", openapi=str)

ModelCard = _answer(
    "ModelCard",
    id=str,
    object=Literal["model"],
    created=int,
    owned_by=str,
    root=str,
    parent=str | None,
    permission=list[dict[str, Any]],
    max_model_len=int,
    weights=str,
    draft=str | None,
)
ModelList = _answer("ModelList", object=Literal["list"], data=_list_of(ModelCard))

CompletionTokensDetails = _answer(
    "CompletionTokensDetails", accepted_prediction_tokens=int, rejected_prediction_tokens=int
)
Usage = _answer(
    "Usage",
    prompt_tokens=int,
    completion_tokens=int,
    total_tokens=int,
    completion_tokens_details=(CompletionTokensDetails | None, None),  # only where a draft guesses
)

_ANSWER = {"id": str, "created": int, "model": str, "system_fingerprint": str, "usage": Usage}
_CHOICE = {"index": int, "logprobs": dict[str, Any] | None, "finish_reason": str | None}
CompletionChoice = _answer("CompletionChoice", **_CHOICE, text=str, seed=int)
Completion = _answer("Completion", **_ANSWER, object=Literal["text_completion"], choices=_list_of(CompletionChoice))
AnswerMessage = _answer("AnswerMessage", role=Literal["assistant"], content=str | None)
ChatChoice = _answer("ChatChoice", **_CHOICE, message=AnswerMessage, seed=int)
ChatCompletion = _answer("ChatCompletion", **_ANSWER, object=Literal["chat.completion"], choices=_list_of(ChatChoice))

MessageUsage = _answer(
    "MessageUsage",
    input_tokens=int,
    cache_creation_input_tokens=int,
    cache_read_input_tokens=int,
    output_tokens=int,
)
AnsweredMessage = _answer(
    "AnsweredMessage",
    id=str,
    type=Literal["message"],
    role=Literal["assistant"],
    model=str,
    content=list[dict[str, Any]],
    stop_reason=Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"],
    stop_sequence=str | None,
    usage=MessageUsage,
)
CountedTokens = _answer("CountedTokens", input_tokens=int)

_LINE = {"model": str, "created_at": str, "done": bool, "done_reason": (str | None, None)}
OllamaChatLine = _answer("OllamaChatLine", **_LINE, message=dict[str, Any])
OllamaText = _answer("OllamaText", **_LINE, response=str)
OllamaModels = _answer("OllamaModels", models=list[dict[str, Any]])
OllamaModel = _answer(
    "OllamaModel", template=str, details=dict[str, Any], model_info=dict[str, Any], capabilities=list[str]
)
OllamaError = _answer("OllamaError", error=str)

PromptUsage = _answer("PromptUsage", prompt_tokens=int, total_tokens=int)
_POOLED = {"id": str, "created": int, "model": str, "usage": PromptUsage}
Embedding = _answer("Embedding", object=Literal["embedding"], index=int, embedding=list[float] | str)
Embeddings = _answer("Embeddings", **_POOLED, object=Literal["list"], data=_list_of(Embedding))
PooledData = _answer("PooledData", object=Literal["pooling"], index=int, data=list[float] | str)
Pooled = _answer("Pooled", **_POOLED, object=Literal["list"], data=_list_of(PooledData))
ScoreOfPair = _answer("ScoreOfPair", object=Literal["score"], index=int, score=float)
Scores = _answer("Scores", **_POOLED, object=Literal["list"], data=_list_of(ScoreOfPair))
RankedDocument = _answer("RankedDocument", index=int, relevance_score=float, document=(dict[str, str] | None, None))
Ranking = _answer("Ranking", **_POOLED, object=Literal["rerank"], results=_list_of(RankedDocument))

ResponseUsage = _answer("ResponseUsage", input_tokens=int, output_tokens=int, total_tokens=int)
ResponseObject = _answer(
    "ResponseObject",
    id=str,
    object=Literal["response"],
    created_at=int,
    status=Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"],
    model=str,
    system_fingerprint=str,
    seed=int,
    output=list[dict[str, Any]],
    usage=ResponseUsage | None,
)
RecordedRequest = _answer(
    "RecordedRequest",
    id=str,
    object=Literal["request"],
    path=str,
    seed=int | list[int],
    system_fingerprint=str,
    request=dict[str, Any],
    choices=list[dict[str, Any]],
)
DeletedResponse = _answer("DeletedResponse", id=str, object=Literal["response"], deleted=Literal[True])
ItemList = _answer(
    "ItemList",
    object=Literal["list"],
    data=list[dict[str, Any]],
    first_id=str,
    last_id=str,
    has_more=bool,
)

StoredFile = _answer(
    "StoredFile", id=str, object=Literal["file"], bytes=int, created_at=int, filename=str, purpose=str, status=str
)
FileList = _answer("FileList", object=Literal["list"], data=_list_of(StoredFile), has_more=bool)
DeletedFile = _answer("DeletedFile", id=str, object=Literal["file"], deleted=Literal[True])
RequestCounts = _answer("RequestCounts", total=int, completed=int, failed=int)
Batch = _answer(
    "Batch",
    id=str,
    object=Literal["batch"],
    endpoint=str,
    input_file_id=str,
    completion_window=str,
    status=Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ],
    output_file_id=str | None,
    error_file_id=str | None,
    created_at=int,
    expires_at=int,
    request_counts=RequestCounts,
    metadata=dict[str, str] | None,
)
BatchList = _answer("BatchList", object=Literal["list"], data=_list_of(Batch), has_more=bool)

ErrorObject = _answer("ErrorObject", message=str, type=str, param=str | None, code=str | None)
Error = _answer("Error", error=ErrorObject)
MessagesErrorObject = _answer("MessagesErrorObject", type=str, message=str)
MessagesError = _answer("MessagesError", type=Literal["error"], error=MessagesErrorObject)
Unhealthy = _answer("Unhealthy", error=ErrorObject, status=Literal["unavailable"], reason=str)
NotReady = _answer("NotReady", error=ErrorObject, status=Literal["loading", "unavailable"], phase=str)


# ---- routes ----------------------------------------------------------------------------------------------------------

_ERRORS = {
    400: "A field is at fault, or the body is no JSON object.",
    401: "The API key is missing or not known.",
    403: "The request names a host that this server does not answer as, or asks for what it does not allow.",
    404: "There is no such model, or no such response, file or batch.",
    405: "The route has other methods.",
    408: "The body did not come in time.",
    413: "The body is too long, or the files have reached a limit of bytes.",
    415: "The body is not declared to be JSON.",
    429: "The engine's queue is full, or a limit of files, uploads, batches or names of adapters is reached.",
    431: "The headers are too long.",
    499: "The request was aborted by its id.",
    500: "The server failed.",
    503: "The server is loading, draining or recovering, or its disk fails.",
    504: "A deadline of the server has passed.",
}
_ANY = (405, 431, 500)
_BODY = (400, 408, 413, 415)
_TOKENIZE = (TokenizeTextRequest, TokenizeChatRequest)
_GENERATION = (*_BODY, 404, 429, 499, 503, 504)
_ADAPTERS = (*_BODY, 403, 503, 504)
_ENGINES = (403, 503, 504)
_STORED = (400, 404, 503)
_DISK = (404, 503)
_RESPONSE = "/v1/responses/{response_id}"
_LINES = "application/x-ndjson"  # an answer's objects, one a line
_FILES, _BATCHES = "/v1/files", "/v1/batches"
_ANSWER_HEADERS = {429: "Retry-After", 503: "Retry-After", 401: "WWW-Authenticate", 405: "Allow"}


@dataclass(frozen=True, slots=True)
class _Operation:
    """A POST if it has requests, else a GET, unless it has a method."""

    path: str
    summary: str
    answer: type[BaseModel] | None  # None: plain text
    requests: tuple[type[BaseModel], ...] = ()
    errors: tuple[int, ...] = ()
    streams: bool = False  # with "stream": true
    media_type: str = "text/event-stream"  # of streams
    unready: type[BaseModel] | None = None  # the 503 of a probe, which is no error
    open: bool = False  # whether it needs no API key
    error: type[BaseModel] = Error
    method: str = ""
    query: type[BaseModel] | None = None
    form: type[BaseModel] | None = None  # in place of JSON


_OPERATIONS = (
    _Operation("/v1/completions", "Complete texts", Completion, (CompletionRequest,), _GENERATION, streams=True),
    _Operation("/v1/chat/completions", "Answer a chat", ChatCompletion, (ChatRequest,), _GENERATION, streams=True),
    _Operation(
        "/v1/messages",
        "Answer a chat, in Anthropic's form",
        AnsweredMessage,
        (MessagesRequest,),
        _GENERATION,
        streams=True,
        error=MessagesError,
    ),
    _Operation(
        "/v1/messages/count_tokens",
        "The number of tokens of a message's prompt",
        CountedTokens,
        (CountTokensRequest,),
        (*_BODY, 404, 503),
        error=MessagesError,
    ),
    _Operation(
        "/api/chat",
        "Answer a chat, in Ollama's form",
        OllamaChatLine,
        (OllamaChatRequest,),
        _GENERATION,
        streams=True,
        media_type=_LINES,
        error=OllamaError,
    ),
    _Operation(
        "/api/generate",
        "Answer a prompt, in Ollama's form",
        OllamaText,
        (OllamaGenerateRequest,),
        _GENERATION,
        streams=True,
        media_type=_LINES,
        error=OllamaError,
    ),
    _Operation("/api/tags", "The models, for Ollama's clients", OllamaModels, errors=(503,), error=OllamaError),
    _Operation("/api/ps", "The same models", OllamaModels, errors=(503,), error=OllamaError),
    _Operation(
        "/api/show", "A model, for Ollama's clients", OllamaModel, (ShowRequest,), (*_BODY, 404, 503), error=OllamaError
    ),
    _Operation("/api/version", "The version of Ollama's API", Version, error=OllamaError),
    _Operation("/v1/embeddings", "Vectors of texts", Embeddings, (EmbeddingRequest,), _GENERATION),
    _Operation("/pooling", "Vectors of texts as the model makes them", Pooled, (PoolingRequest,), _GENERATION),
    _Operation("/v1/score", "How well texts go together", Scores, (ScoreRequest,), _GENERATION),
    _Operation("/v1/rerank", "Documents in the order of a query", Ranking, (RerankRequest,), _GENERATION),
    _Operation(
        "/v1/responses", "Answer a chat of items", ResponseObject, (ResponsesRequest,), _GENERATION, streams=True
    ),
    _Operation(_RESPONSE, "A stored response", ResponseObject, (), _STORED, streams=True, query=RetrieveQuery),
    _Operation(_RESPONSE, "Forget a stored response", DeletedResponse, (), _STORED, method="delete"),
    _Operation(f"{_RESPONSE}/cancel", "End a response in the background", ResponseObject, (), _STORED, method="post"),
    _Operation(f"{_RESPONSE}/input_items", "A response's input", ItemList, (), _STORED, query=InputItemsQuery),
    _Operation(_FILES, "Upload a file", StoredFile, (), (*_BODY, 403, *_DISK, 429), method="post", form=UploadForm),
    _Operation(_FILES, "Files", FileList, (), (400, *_DISK), query=FilesQuery),
    _Operation(f"{_FILES}/{{file_id}}", "A file, by its id", StoredFile, (), _DISK),
    _Operation(f"{_FILES}/{{file_id}}", "Delete a file", DeletedFile, (), _DISK, method="delete"),
    _Operation(f"{_FILES}/{{file_id}}/content", "The bytes of a file", None, (), _DISK),
    _Operation(_BATCHES, "Answer the requests of a file", Batch, (CreateBatchRequest,), (*_BODY, *_DISK, 429)),
    _Operation(_BATCHES, "Batches, the newest first", BatchList, (), (400, *_DISK), query=BatchesQuery),
    _Operation(f"{_BATCHES}/{{batch_id}}", "A batch, by its id", Batch, (), _DISK),
    _Operation(f"{_BATCHES}/{{batch_id}}/cancel", "End a batch", Batch, (), (400, *_DISK), method="post"),
    _Operation("/v1/requests/{request_id}", "A request among a front's latest", RecordedRequest, (), (404,)),
    _Operation("/v1/models", "The model that is served, and its adapters", ModelList, errors=(503,)),
    _Operation("/v1/models/{model}", "The model or an adapter, by its name", ModelCard, errors=(404, 503)),
    _Operation("/v1/load_lora_adapter", "Load an adapter", None, (LoadAdapterRequest,), (*_ADAPTERS, 429)),
    _Operation("/v1/unload_lora_adapter", "Unload an adapter", None, (UnloadAdapterRequest,), (*_ADAPTERS, 404)),
    _Operation("/v1/abort", "End a request", Aborted, (AbortRequest,), _BODY),
    _Operation("/tokenize", "The token ids of a text or of a chat's prompt", Tokenized, _TOKENIZE, (*_BODY, 404, 503)),
    _Operation("/detokenize", "The text of token ids", Detokenized, (DetokenizeRequest,), (*_BODY, 404, 503)),
    _Operation("/tokenizer_info", "The tokenizer's settings", TokenizerInfo, errors=(503,)),
    _Operation("/health", "Whether requests can be served now", Health, unready=Unhealthy, open=True),
    _Operation("/ready", "Whether the start is complete", Ready, unready=NotReady, open=True),
    _Operation("/ping", "The same, for SageMaker", Health, unready=Unhealthy, open=True),
    _Operation("/ping", "The same, for SageMaker", Health, unready=Unhealthy, open=True, method="post"),
    _Operation("/reset_prefix_cache", "Forget prefixes that no request holds", None, errors=_ENGINES, method="post"),
    _Operation("/sleep", "Give memory back", None, errors=(400, *_ENGINES), method="post", query=SleepQuery),
    _Operation("/wake_up", "Compute again", None, errors=(400, *_ENGINES), method="post"),
    _Operation("/is_sleeping", "Whether an engine sleeps", Sleeping, errors=(503,)),
    _Operation("/chaos", "Kill an engine or runner", Killed, errors=(400, *_ENGINES), method="post", query=ChaosQuery),
    _Operation("/check_grammar", "Whether an output can be bound", CheckedGrammar, (GrammarRequest,), (*_BODY, 429)),
    _Operation("/load", "How many requests this front answers now", Load),
    _Operation("/server_info", "The model, and how it computes", ServerInfo, errors=(503,)),
    _Operation("/metrics", "All metrics of the application, for Prometheus", None),
    _Operation("/version", "The version of Callboard", Version),
    _Operation("/openapi.json", "This page", Document),
)


@cache
def document(settings: HttpSettings) -> dict[str, Any]:
    """The page for a server with these settings."""
    has_keys, has_hosts = settings.has_keys, bool(settings.allowed_host)
    models = {
        m for op in _OPERATIONS for m in (op.answer, *op.requests, op.form, op.unready, op.error) if m is not None
    }
    in_order = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema(
        [(model, "validation") for model in in_order], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for op in _OPERATIONS:
        method = op.method or ("post" if op.requests else "get")
        paths.setdefault(op.path, {})[method] = _operation(op, has_keys, has_hosts)
    page: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Callboard", "version": version("callboard")},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }
    if has_keys:
        page["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return page


def _operation(op: _Operation, has_keys: bool, has_hosts: bool) -> dict[str, Any]:
    needs_key = has_keys and not op.open
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}} if op.answer is None else _json(op.answer)
    if op.streams:
        # What each event looks like, which is how tools read the schema of a stream.
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
        content[op.media_type] = {"schema": {} if op.media_type == _LINES else event}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    if op.unready is not None:
        responses["503"] = {"description": "Not now.", "content": _json(op.unready)}
    at_the_gate = {status for status, on in ((401, has_keys), (403, has_hosts)) if on and not op.open}
    for status in sorted({*_ANY, *op.errors, *at_the_gate}):
        responses[str(status)] = {"description": _ERRORS[status], "content": _json(op.error)}
        if name := _ANSWER_HEADERS.get(status):
            responses[str(status)]["headers"] = {name: {"schema": {"type": "string"}}}
    name = op.path.strip("/").replace("/", "_").replace("{", "by_").replace("}", "").replace(".", "_")
    described: dict[str, Any] = {
        "summary": op.summary,
        "operationId": f"{name}_{op.method}" if op.method else name,
        "responses": responses,
        "security": [{"key": []}, {"x-api-key": []}] if needs_key else [],
    }
    if parameters := _parameters(op):
        described["parameters"] = parameters
    if op.requests:
        described["requestBody"] = {"required": True, "content": _json(*op.requests)}
    if op.form is not None:
        content = {"multipart/form-data": {"schema": {"$ref": f"#/components/schemas/{op.form.__name__}"}}}
        described["requestBody"] = {"required": True, "content": content}
    return described


_PATH_PARAMETERS = {
    "model": "It may hold slashes.",
    "response_id": "As it was answered.",
    "request_id": "Of its answer.",
    "file_id": "As it was answered.",
    "batch_id": "As it was answered.",
}


def _parameters(op: _Operation) -> list[dict[str, Any]]:
    """Those of an operation's path, and of its query."""
    parameters: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": description,
            "schema": {"type": "string", "minLength": 1},
        }
        for name, description in _PATH_PARAMETERS.items()
        if f"{{{name}}}" in op.path
    ]
    if op.query is not None:
        properties = op.query.model_json_schema()["properties"]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]
    return parameters


def _json(*models: type[BaseModel]) -> dict[str, Any]:
    refs = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in models]
    return {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}}
