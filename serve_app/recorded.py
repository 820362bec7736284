"""The latest requests of a front, which `callboard replay` sends again. They are in memory only."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from runtime.output.fields import shortened
from runtime.output.processor import Delta
from serve_app.endpoints import ENDPOINTS
from serve_app.errors import ApiError
from serve_app.prepared_request import PreparedRequest

_ENTRY_BYTES = 1 << 10  # of an entry, beside its body and its tokens


@dataclass(slots=True, eq=False)
class _Recorded:
    """A request and the tokens of its answer."""

    prepared: PreparedRequest[Any]
    path: str
    body: bytes
    tokens: list[array[int]]  # of each choice
    reasons: list[str | None]
    num_bytes: int


class RecordedRequests:
    """As many of the latest requests as `max_bytes` hold. Its methods are called on one thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: dict[str, _Recorded] = {}  # by the ids of their answers, oldest first

    def begin(self, prepared: PreparedRequest[Any], path: str, body: bytes) -> PreparedRequest[Any]:
        """The same request, whose answer is recorded."""
        if _ENTRY_BYTES + len(body) > self._max_bytes:
            return prepared
        self._forget(prepared.id)
        num_choices = len(prepared.requests)
        recorded = _Recorded(prepared, path, body, [array("i") for _ in range(num_choices)], [None] * num_choices, 0)
        self._kept[prepared.id] = recorded
        self._charge(recorded, _ENTRY_BYTES + len(body))
        return replace(prepared, on_delta=partial(self._add, recorded))

    def found(self, request_id: str, owner: str) -> dict[str, Any]:
        """A request by the id of its answer, or by the client's own; raises the 404."""
        prefixes = ("", *(endpoint.id_prefix for endpoint in ENDPOINTS))
        found = (self._kept.get(prefix + request_id) for prefix in prefixes)
        recorded = next((r for r in found if r is not None and r.prepared.owner == owner), None)
        if recorded is None:
            text = f"This front has no request {shortened(request_id)!r} among its latest; another one may have it."
            raise ApiError(404, text, code="request_not_found")
        prepared = recorded.prepared
        answer = zip(recorded.tokens, recorded.reasons, strict=True)
        return {
            "id": prepared.id,
            "object": "request",
            "path": recorded.path,
            "seed": prepared.seed,
            "system_fingerprint": prepared.model.fingerprint,
            "request": msgspec.Raw(recorded.body),
            "choices": [
                {"index": i, "token_ids": list(ids), "finish_reason": reason} for i, (ids, reason) in enumerate(answer)
            ],
        }

    def _add(self, recorded: _Recorded, delta: Delta) -> None:
        recorded.tokens[delta.index].extend(delta.token_ids)
        if delta.finish_reason is not None:
            recorded.reasons[delta.index] = delta.finish_reason
            if self._kept.get(recorded.prepared.id) is recorded:
                ids = recorded.tokens[delta.index]
                self._charge(recorded, len(ids) * ids.itemsize)

    def _charge(self, recorded: _Recorded, num_bytes: int) -> None:
        recorded.num_bytes += num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def _forget(self, answer_id: str) -> None:
        if (recorded := self._kept.pop(answer_id, None)) is not None:
            self._num_bytes -= recorded.num_bytes
