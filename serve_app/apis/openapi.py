"""The OpenAPI 3.1 document of an application's routes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any, get_args, get_origin

import msgspec
from pydantic.json_schema import models_json_schema

from serve_app.protocol.operation import ApiRoute, Operation
from serve_app.settings import HttpSettings

_ERRORS = {
    400: "A field is at fault, or the body is not a JSON object.",
    401: "The API key is missing or unknown.",
    403: "The request names a host that this server does not serve, or an action that it does not allow.",
    404: "There is no such model, response, file or batch.",
    405: "The route has other methods.",
    408: "The body did not come in time.",
    409: "Another update of the weights is open, or none is.",
    413: "The body is too long, or the files have reached a limit of bytes.",
    415: "The body is not declared to be JSON.",
    429: "The engine's queue is full, or a limit of files, uploads, batches or names of adapters is reached.",
    431: "The headers are too long.",
    499: "The request was aborted by its id or by a pause, and its answer has no form for a part.",
    500: "The server failed.",
    503: "The server is loading, draining or recovering, or its disk fails.",
    504: "A deadline of the server has passed.",
}
_ANY = (405, 431, 500)  # every route's statuses
_ERROR_HEADERS = {429: "Retry-After", 503: "Retry-After", 401: "WWW-Authenticate", 405: "Allow"}
_PATH_PARAMETERS = {
    "model": "It may hold slashes.",
    "response_id": "The id of a response.",
    "request_id": "The id of an answer.",
    "file_id": "The id of a file.",
    "batch_id": "The id of a batch.",
}
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_REF = "#/components/schemas/"


def document(routes: Iterable[object], settings: HttpSettings) -> dict[str, Any]:
    """Return the document of a server with these routes and settings."""
    paths: dict[str, dict[str, Any]] = {}
    operations: list[Operation] = []
    for route in routes:
        if isinstance(route, ApiRoute):
            path = route.path.replace("{name:path}", "{model}")
            for operation in route.operations:
                operations.append(operation)
                paths.setdefault(path, {})[operation.http_method.lower()] = _described(path, operation, settings)
    page: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Callboard", "version": version("callboard")},
        "paths": paths,
        "components": {"schemas": _schemas(operations)},
    }
    if settings.has_keys:
        page["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return page


def _schemas(operations: list[Operation]) -> dict[str, Any]:
    """Return the schemas by name: requests', from the models that check them, and answers'."""
    used = (a for op in operations for a in (op.answer, *op.others, op.unready, op.error))
    answers = {_named(answer) for answer in used if answer is not None}
    requests = {model for op in operations for model in (*op.requests, op.form) if model is not None}
    models = sorted(requests, key=lambda model: model.__name__)
    template = f"{_REF}{{model}}"
    _, checked = models_json_schema([(model, "validation") for model in models], ref_template=template)
    structs = sorted(answers, key=lambda answer: answer.__name__)
    _, sent = msgspec.json.schema_components(structs, ref_template=f"{_REF}{{name}}")
    return {**checked["$defs"], **sent}


def _described(path: str, op: Operation, settings: HttpSettings) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if op.answer is not None:
        content = _json(op.answer, *op.others)
    if op.streams:  # described by one of its events, as tools expect
        content[op.media_type] = {"schema": _EVENT if op.media_type == "text/event-stream" else {}}
    responses: dict[str, Any] = {"200": {"description": "The answer.", "content": content}}
    if op.unready is not None:
        responses["503"] = {"description": "Not now.", "content": _json(op.unready)}
    needs_key = settings.has_keys and not op.open
    before = {status for status, on in ((401, needs_key), (403, settings.allowed_host and not op.open)) if on}
    for status in sorted({*_ANY, *op.errors, *before}):
        responses[str(status)] = {"description": _ERRORS[status], "content": _json(op.error)}
        if name := _ERROR_HEADERS.get(status):
            responses[str(status)]["headers"] = {name: {"schema": {"type": "string"}}}
    name = path.strip("/").replace("/", "_").replace("{", "by_").replace("}", "").replace(".", "_")
    described: dict[str, Any] = {
        "summary": op.summary,
        "operationId": f"{name}_{op.method.lower()}" if op.method else name,
        "responses": responses,
        "security": [{"key": []}, {"x-api-key": []}] if needs_key else [],
    }
    if parameters := _parameters(path, op):
        described["parameters"] = parameters
    if op.requests:
        described["requestBody"] = {"required": op.needs_body, "content": _json(*op.requests)}
    if op.form is not None:
        content = {"multipart/form-data": {"schema": {"$ref": f"{_REF}{op.form.__name__}"}}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _parameters(path: str, op: Operation) -> list[dict[str, Any]]:
    """Return the parameters of a path and its query."""
    schema = {"type": "string", "minLength": 1}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "description": _PATH_PARAMETERS[name], "schema": schema}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if op.query is not None:
        properties = op.query.model_json_schema()["properties"]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]
    return parameters


def _json(*models: Any) -> dict[str, Any]:
    """Return the content: one of these models, or a list."""
    refs: list[dict[str, Any]] = []
    for model in models:
        ref = {"$ref": f"{_REF}{_named(model).__name__}"}
        refs.append({"type": "array", "items": ref} if get_origin(model) is list else ref)
    return {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}}


def _named(model: Any) -> Any:
    """Return the model of a list's items, or the model itself."""
    return get_args(model)[0] if get_origin(model) is list else model
