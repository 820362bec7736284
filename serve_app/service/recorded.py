"""The latest requests of a front, for `callboard replay`. They stay in memory only."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from runtime.output.fields import shortened
from runtime.output.processor import Delta
from serve_app.protocol.answers import encode_json, listed
from serve_app.protocol.errors import ApiError
from serve_app.protocol.prepared_request import PreparedRequest

_ENTRY_BYTES = 1 << 10  # an entry's overhead besides its body, seeds and tokens
_CHOICE_BYTES = 256  # a choice and its seed
_TOKEN_BYTES = array("i").itemsize


@dataclass(slots=True, eq=False)
class _Recorded:
    """A request and the tokens of its answer, without references to its prepared form."""

    id: str
    path: str
    body: bytes
    seed: int | list[int]
    fingerprint: str
    tokens: list[array[int]]  # each choice's tokens
    reasons: list[str | None]
    num_bytes: int = 0
    is_kept: bool = True


class RecordedRequests:
    """The latest requests that fit into `max_bytes`. One thread calls its methods."""

    def __init__(self, max_bytes: int, id_prefixes: Sequence[str]) -> None:
        """`id_prefixes` precede a client's own id in ids of answers."""
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._prefixes = ("", *id_prefixes)
        self._kept: dict[tuple[str, str], _Recorded] = {}  # recordings by owner and answer id, oldest first

    def begin(self, prepared: PreparedRequest[Any], path: str, body: bytes) -> PreparedRequest[Any]:
        """Return the request with a callback that records its answer."""
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
        """Return a function that renders the request with this id, of its answer or the client's own.

        Raises the 404 without such a request."""
        found = (self._kept.get((owner, prefix + request_id)) for prefix in self._prefixes)
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
            # The request may still run.
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
