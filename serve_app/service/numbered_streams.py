"""Streams with event ids, which a request's headers enable or take up."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import msgspec

from runtime.output.fields import invalid
from runtime.output.processor import Delta
from serve_app.protocol.errors import ApiError
from serve_app.protocol.event_ids import EventId, EventIds, mismatch
from serve_app.protocol.prepared_request import PreparedRequest, R
from serve_app.protocol.sse import EventStream

_WANTED, _LAST = b"x-callboard-event-ids", b"last-event-id"  # headers
_MAX_CHOICES = 64  # each has its number in every id
_DIGEST_BYTES = 8


class NumberedStream(EventStream):
    """A stream with an id at each event."""

    def __init__(self, stream: EventStream, ids: EventIds) -> None:
        self._stream, self._ids = stream, ids
        self._counts = ids.counts()
        self.media_type, self.keep_alive = stream.media_type, stream.keep_alive  # a ping does not belong to the answer

    def first(self) -> bytes:
        return self._numbered(self._stream.first(), 0)

    def events(self, deltas: list[Delta]) -> bytes:
        return b"".join(self._numbered(self._stream.events([delta]), 1 + delta.index) for delta in deltas)

    def is_long(self, deltas: list[Delta]) -> bool:
        return self._stream.is_long(deltas)

    def last(self) -> bytes:
        return self._numbered(self._stream.last(), -1)

    def failed(self, error: ApiError) -> bytes:
        """Return an error without an id, so the stream can be taken up after its last event."""
        return self._stream.failed(error)

    def _numbered(self, events: bytes, at: int) -> bytes:
        place = at % len(self._counts)
        each = (event + b"\n\n" for event in events.split(b"\n\n")[:-1])
        return b"".join(self._ids.numbered(each, self._counts, place))


def with_event_ids(
    headers: dict[bytes, bytes], request: R, prepare: Callable[[R, str], PreparedRequest[R]]
) -> PreparedRequest[R]:
    """Return a stream's prepared request, with event ids if its headers want them; raises FieldError or ApiError.

    `prepare` takes the request and its answer's id, which is empty for a new one."""
    last = EventId.of(headers[_LAST].decode("latin-1")) if _LAST in headers else None
    if last is None and headers.get(_WANTED, b"").lower() != b"true":
        return prepare(request, "")
    if last is not None:
        if not request.stream:
            raise invalid("Last-Event-ID", "is only allowed when stream is true")
        if len(last.seeds) not in (1, request.num_prompts()):
            raise mismatch()
        seeds = last.seeds[0] if len(last.seeds) == 1 else list(last.seeds)
        prepared = prepare(request.model_copy(update={"seed": seeds}), last.answer_id)
    else:
        prepared = prepare(request, "")
        if not request.stream:
            return prepared
    if len(prepared.requests) > _MAX_CHOICES:
        raise invalid("X-Callboard-Event-Ids", f"allows {_MAX_CHOICES} choices, and here are {len(prepared.requests)}")
    seeds = prepared.seed if isinstance(prepared.seed, list) else [prepared.seed]
    ids = EventIds(prepared.id, _digest(prepared), seeds, len(prepared.requests), last)
    requests = [replace(each, keeps_output=True, resumes=ids.resumes) for each in prepared.requests]
    return replace(prepared, requests=requests, event_ids=ids)


def _digest(prepared: PreparedRequest[Any]) -> str:
    facts = version("callboard"), prepared.id, prepared.model.fingerprint, repr(prepared.prompts.grammar)
    digest = hashlib.blake2b(repr(facts).encode(), digest_size=_DIGEST_BYTES)
    for request in prepared.requests[:: prepared.num_choices]:
        digest.update(array("i", request.token_ids))
        params, images = replace(request.params, seed=None), request.named.images
        digest.update(msgspec.msgpack.encode((request.prompt_len, request.seed, params, images)))
    return digest.hexdigest()
