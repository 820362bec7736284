"""The latest requests of a front, which `callboard replay` sends again. They are in memory only."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from runtime.output.fields import shortened
from runtime.output.processor import Delta
from serve_app.apis.table import ENDPOINTS
from serve_app.protocol.answers import encode_json, listed
from serve_app.protocol.errors import ApiError
from serve_app.protocol.prepared_request import PreparedRequest

_ENTRY_BYTES = 1 << 10  # of an entry, beside its body, its seeds and its tokens
_CHOICE_BYTES = 256  # of a choice and its seed
_TOKEN_BYTES = array("i").itemsize


@dataclass(slots=True, eq=False)
class _Recorded:
    """A request and the tokens of its answer. It holds no part of what the request was prepared to."""

    id: str
    path: str
    body: bytes
    seed: int | list[int]
    fingerprint: str
    tokens: list[array[int]]  # of each choice
    reasons: list[str | None]
    num_bytes: int = 0
    is_kept: bool = True


class RecordedRequests:
    """As many of the latest requests as `max_bytes` hold. Its methods are called on one thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: dict[tuple[str, str], _Recorded] = {}  # by owner and the answer's id, oldest first

    def begin(self, prepared: PreparedRequest[Any], path: str, body: bytes) -> PreparedRequest[Any]:
        """The same request, whose answer is recorded."""
        num_choices = len(prepared.requests)
        num_bytes = _ENTRY_BYTES + len(body) + _CHOICE_BYTES * num_choices
        if num_bytes > self._max_bytes:
            return prepared
        key = prepared.owner, prepared.id
        self._forget(key)
        tokens = [array("i") for _ in range(num_choices)]
        fingerprint = prepared.model.fingerprint
        recorded = _Recorded(prepared.id, path, body, prepared.seed, fingerprint, tokens, [None] * num_choices)
        self._kept[key] = recorded
        self._charge(recorded, num_bytes)
        return replace(prepared, on_delta=partial(self._add, recorded))

    def found(self, request_id: str, owner: str) -> Callable[[], bytes]:
        """What renders a request, found by the id of its answer or by the client's own; raises the 404."""
        prefixes = ("", *(endpoint.id_prefix for endpoint in ENDPOINTS))
        found = (self._kept.get((owner, prefix + request_id)) for prefix in prefixes)
        recorded = next((r for r in found if r is not None), None)
        if recorded is None:
            text = f"This front has no request {shortened(request_id)!r} among its latest; another one may have it."
            raise ApiError(404, text, code="request_not_found")
        return partial(_rendered, recorded, recorded.body, recorded.tokens)

    def _add(self, recorded: _Recorded, delta: Delta) -> None:
        if not recorded.is_kept:
            return
        recorded.tokens[delta.index].extend(delta.token_ids)
        if delta.finish_reason is not None:
            recorded.reasons[delta.index] = delta.finish_reason
        self._charge(recorded, len(delta.token_ids) * _TOKEN_BYTES)

    def _charge(self, recorded: _Recorded, num_bytes: int) -> None:
        recorded.num_bytes += num_bytes
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._kept)))

    def _forget(self, key: tuple[str, str]) -> None:
        if (recorded := self._kept.pop(key, None)) is not None:
            self._num_bytes -= recorded.num_bytes
            # Its request may still run.
            recorded.is_kept, recorded.body, recorded.tokens = False, b"", []


def _rendered(recorded: _Recorded, body: bytes, tokens: list[array[int]]) -> bytes:
    answer = zip(tokens, recorded.reasons, strict=True)
    return encode_json(
        {
            "id": recorded.id,
            "object": "request",
            "path": recorded.path,
            "seed": recorded.seed,
            "system_fingerprint": recorded.fingerprint,
            "request": msgspec.Raw(body),
            "choices": [
                {"index": i, "token_ids": listed(ids, int), "finish_reason": reason}
                for i, (ids, reason) in enumerate(answer)
            ],
        }
    )
