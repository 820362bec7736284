"""Requests from the bytes of their JSON."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field, ValidationError

from serve_app.errors import ApiError, echoed
from serve_app.requests.sampling import SamplingFields
from serve_app.requests.shapes import RequestModel, shown


class AbortRequest(RequestModel):
    """POST /v1/abort: the id of an answer, or the client's own for the request (X-Request-Id, request_id)."""

    request_id: Annotated[str, Field(min_length=1, max_length=256)]


_R = TypeVar("_R", bound=SamplingFields)


def parse(kind: type[_R], body: bytes) -> _R:
    """A request from the bytes of its JSON; raises ApiError with the path of the first field at fault."""
    request = validated(kind, body)
    request.check()
    return request


_M = TypeVar("_M", bound=RequestModel)


def validated(kind: type[_M], body: bytes) -> _M:
    """What `body` says, field by field; raises ApiError with the path of the first field at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        raise _plain(e) from None


def _plain(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    reason = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The request body is not valid JSON: {first['ctx']['error']}.", code="invalid_json")
    path = echoed(".".join(str(at) for at in first["loc"] if not str(at).startswith("<")))
    if not path:
        return ApiError(400, "The request body must be a JSON object.")
    if first["type"] == "missing":
        return ApiError(400, f"{path} is missing; it is required.", param=path)
    return ApiError(400, f"{path} is {shown(first['input'])}: {reason}.", param=path)
