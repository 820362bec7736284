"""A route with its description, from which GET /openapi.json is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.routing import Route

# Error statuses, by what an operation does.
BODY = (400, 408, 413, 415)  # it reads a JSON body
GENERATION = (*BODY, 404, 429, 503, 504)
WHOLE_ANSWERS = (*GENERATION, 499)  # an aborted request ends as an error
ENGINES = (403, 503, 504)  # it waits for all engines

Answer = type[Any]  # a msgspec.Struct, or a list


class ErrorObject(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct):
    error: ErrorObject


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a route. Answers may hold more than their types."""

    summary: str
    answer: Answer | None  # None for plain text
    requests: tuple[type[BaseModel], ...] = ()  # kinds of JSON bodies
    errors: tuple[int, ...] = ()  # statuses besides the common ones
    streams: bool = False  # "stream": true is allowed
    media_type: str = "text/event-stream"  # the streams' media type
    unready: Answer | None = None  # a probe's 503, which is not an error
    open: bool = False  # true if clients without an API key may use it
    error: Answer = Error
    method: str = ""  # default: POST with a body, GET without
    needs_body: bool = True  # false if a request may leave out its body
    others: tuple[Any, ...] = ()  # other answer types, also list[TYPE]
    query: type[BaseModel] | None = None
    form: type[BaseModel] | None = None  # replaces JSON

    @property
    def http_method(self) -> str:
        return self.method or ("POST" if self.requests or self.form else "GET")


class ApiRoute(Route):
    """A route of the API and its operations."""

    def __init__(self, path: str, endpoint: Any, *operations: Operation) -> None:
        super().__init__(path, endpoint, methods=[operation.http_method for operation in operations])
        self.operations = operations


def route(
    path: str,
    endpoint: Any,
    summary: str,
    answer: Answer | None,
    requests: tuple[type[BaseModel], ...] = (),
    errors: tuple[int, ...] = (),
    **more: Any,
) -> ApiRoute:
    """Return a route of one operation; `more` are its other fields."""
    return ApiRoute(path, endpoint, Operation(summary, answer, requests, errors, **more))
