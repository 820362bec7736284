"""Requests from the bytes of their JSON.

Parsing holds Python's lock, and with it all streams of a process, so what a body may cost is bounded before it is
parsed: the number of its values, and token ids, which may be many, are read a piece at a time.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from runtime.output.fields import FieldError, fault_of, invalid, path_of
from runtime.output.options import OutputOptions
from runtime.spec.types import CallboardError
from serve_app.protocol.errors import ApiError
from serve_app.protocol.sampling import MAX_CHOICES
from serve_app.protocol.shapes import MAX_VALUES, RequestModel, TokenIds, has_too_many_values

_LONG_BYTES = 64 << 10  # a shorter body is no matter, whatever it holds
_PIECE_BYTES = 64 << 10  # of token ids that are read at once


class AbortRequest(RequestModel):
    """POST /v1/abort: the id of an answer, or the client's own for the request (X-Request-Id, request_id)."""

    request_id: Annotated[str, Field(min_length=1, max_length=256)]


class GrammarRequest(RequestModel, OutputOptions):
    """POST /check_grammar: the fields of a completion's or a chat's request that bind its output."""

    model_config = ConfigDict(extra="ignore")


_R = TypeVar("_R", bound=RequestModel)


def parse(kind: type[_R], body: bytes) -> _R:
    """A request from the bytes of its JSON; raises FieldError for the first field at fault, and ApiError."""
    ids: dict[str, list[int] | list[list[int]]] = {}
    if len(body) >= _LONG_BYTES:
        if kind.token_ids_field is not None:
            body, ids = _without_token_ids(kind.token_ids_field, body)
        if has_too_many_values(body):
            raise ApiError(400, f"The request body has over {MAX_VALUES} values beside token ids; send less.")
    try:
        request = kind.model_validate_json(body)
    except ValidationError as e:
        raise _plain(e) from None
    request = request.model_copy(update=ids) if ids else request
    request.check()
    return request


# ---- long bodies -----------------------------------------------------------------------------------------------------

_token_ids_decoder = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]])
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _without_token_ids(name: str, body: bytes) -> tuple[bytes, dict[str, list[int] | list[list[int]]]]:
    """`body` with a short list in place of a long one of token ids, or of lists of them, as its field `name`; and
    that field, if it is such a list. What is no JSON is left to who reads the rest."""
    if body.count(b":") > MAX_VALUES:  # of fields; a text may have as many, but then it is not long ids that come
        return body, {}
    try:
        fields = _fields_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return body, {}
    value = bytes(fields.get(name, b"")).strip()
    first = value[1:64].lstrip()[:1]
    if len(value) < _LONG_BYTES or not value.startswith(b"[") or not (first.isdigit() or first == b"["):
        return body, {}
    fields[name] = msgspec.Raw(b"[0]")
    ids = _token_ids(value, name) if first != b"[" else _token_id_lists(value, name)
    return msgspec.json.encode(fields), {name: ids}


def _token_id_lists(value: bytes, name: str) -> list[list[int]]:
    if (num_lists := value.count(b"[") - 1) > MAX_CHOICES:
        raise invalid(name, f"has {num_lists} lists; at most {MAX_CHOICES} are allowed")
    lists = msgspec.json.decode(value, type=list[msgspec.Raw])
    return [_token_ids(bytes(part).strip(), f"{name}.{i}") for i, part in enumerate(lists)]


def _token_ids(value: bytes, name: str) -> list[int]:
    ids: list[int] = []
    at = 1 if value.startswith(b"[") else len(value)
    while at < len(value):
        end = value.find(b",", at + _PIECE_BYTES)
        end = len(value) - 1 if end < 0 else end
        piece = b"[%b]" % value[at:end]
        try:
            ids += _token_ids_decoder.decode(piece)
        except msgspec.DecodeError:
            raise _no_token_id(name, len(ids), piece) from None
        at = end + 1
    if not ids:
        raise invalid(name, "should be a list of at least one token id")
    return ids


def _no_token_id(name: str, num_before: int, piece: bytes) -> FieldError:
    try:
        TypeAdapter(TokenIds).validate_json(piece, strict=True)
    except ValidationError as e:
        fault = e.errors(include_url=False)[0]
        if fault["loc"]:
            return fault_of(f"{name}.{num_before + int(fault['loc'][0])}", fault)
    return invalid(name, "holds something that is no token id; those are whole numbers from 0 on")


# ---- faults ----------------------------------------------------------------------------------------------------------


def _plain(error: ValidationError) -> CallboardError:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The request body is not valid JSON: {first['ctx']['error']}.", code="invalid_json")
    path = path_of(first)
    return fault_of(path, first) if path else ApiError(400, "The request body must be a JSON object.")
