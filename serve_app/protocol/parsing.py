"""Requests from their JSON bytes.

Parsing holds Python's lock and so delays all streams in a process. Therefore the number of values is checked before
parsing, and long token id lists are parsed a piece at a time."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request as HttpRequest

from runtime.base.types import CallboardError
from runtime.output.fields import FieldError, fault_of, invalid, path_of
from serve_app.protocol.errors import ApiError
from serve_app.protocol.sampling import MAX_CHOICES
from serve_app.protocol.shapes import MAX_VALUES, RequestModel, TokenIds, has_too_many_values

_LONG_BYTES = 64 << 10  # a shorter body parses fast enough with any content
_PIECE_BYTES = 64 << 10  # token ids that are parsed at once


_R = TypeVar("_R", bound=RequestModel)


def parse(kind: type[_R], body: bytes) -> _R:
    """Return a request from the bytes of its JSON; raises FieldError for the first field at fault, and ApiError."""
    try:
        return _parsed(kind, body)
    except FieldError as e:
        e.is_sent = True
        raise


def _parsed(kind: type[_R], body: bytes) -> _R:
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


def read_query(kind: type[_R], request: HttpRequest) -> _R:
    """Return the parameters of a URL; raises FieldError for the first one at fault."""
    try:
        return kind.model_validate(dict(request.query_params))
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        raise fault_of(path_of(first), first) from None


# ---- long bodies -----------------------------------------------------------------------------------------------------

_token_ids_decoder = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]])
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _without_token_ids(name: str, body: bytes) -> tuple[bytes, dict[str, list[int] | list[list[int]]]]:
    """Return `body` with a short list as field `name`, and the field's long list of token ids or such lists.

    Any other body is returned as it is, with no fields. The parser of the rest reports faults in its JSON."""
    if body.count(b":") > MAX_VALUES:  # a body with this many colons does not consist of long id lists
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
    return invalid(name, "holds a value that is not a token id; token ids are whole numbers from 0 on")


# ---- faults ----------------------------------------------------------------------------------------------------------


def _plain(error: ValidationError) -> CallboardError:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The request body is not valid JSON: {first['ctx']['error']}.", code="invalid_json")
    path = path_of(first)
    return fault_of(path, first) if path else ApiError(400, "The request body must be a JSON object.")
