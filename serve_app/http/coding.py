"""Request bodies in a content coding. gzip and deflate are decoded in pieces, so limits of size hold for the result."""

from __future__ import annotations

import zlib

from starlette.types import Message, Receive

from runtime.output.fields import shortened
from serve_app.protocol.errors import UNKNOWN_CODING, ApiError

_PIECE_BYTES = 64 << 10  # decoded at once on the event loop
_GZIP_OR_ZLIB, _RAW = 47, -15  # zlib's wbits; some clients send deflate without zlib's header
_HEAD_BYTES = 2  # zlib's header, which is absent from raw deflate
_CODINGS = {b"gzip", b"x-gzip", b"deflate"}


def codings_of(headers: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Return a request's content codings in the order of use, without identity."""
    names = b",".join(value for name, value in headers if name == b"content-encoding").lower().split(b",")
    return [name.strip() for name in names if name.strip() not in (b"", b"identity")]


def unknown_coding(codings: list[bytes]) -> ApiError | None:
    """Return the 415 for a body that this server cannot decode."""
    if not codings or (len(codings) == 1 and codings[0] in _CODINGS):
        return None
    name = shortened(b", ".join(codings).decode("latin-1"))
    text = f"The request body has the Content-Encoding {name!r}; send it as it is, or in gzip or deflate."
    return ApiError(415, text, code=UNKNOWN_CODING)


class DecodedBody:
    """A `receive` with the decoded body of a request."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._decoder = zlib.decompressobj(_GZIP_OR_ZLIB)
        self._begun = self._rest = b""  # not yet decoded: a part of the header, or any bytes
        self._is_first = self._has_more = True  # no byte was decoded; the client sends more
        self._is_full = False  # the last piece had the most bytes, so the decoder may have more

    async def __call__(self) -> Message:
        if not (self._rest or self._is_full):
            message = await self._receive()
            if message["type"] != "http.request":  # also after the body
                return message
            self._rest, self._has_more = self._begun + message.get("body", b""), message.get("more_body", False)
            self._begun = b""
        if self._is_first and self._has_more and len(self._rest) < _HEAD_BYTES:
            self._begun, self._rest = self._rest, b""
        piece = self._decoded() if self._rest or self._is_full else b""
        self._is_full = len(piece) == _PIECE_BYTES
        has_more = bool(self._rest) or self._is_full or self._has_more
        if not (has_more or self._is_first or self._decoder.eof):
            raise ApiError(400, "The coded request body is incomplete; send all of it.", code="invalid_coding")
        return {"type": "http.request", "body": piece, "more_body": has_more}

    def _decoded(self) -> bytes:
        if self._decoder.eof:  # gzip may have several members
            self._decoder = zlib.decompressobj(_GZIP_OR_ZLIB)
        try:
            piece = self._decoder.decompress(self._rest, _PIECE_BYTES)
        except zlib.error as e:
            if not self._is_first:
                raise ApiError(400, f"The coded request body is damaged: {e}.", code="invalid_coding") from None
            self._is_first, self._decoder = False, zlib.decompressobj(_RAW)
            return self._decoded()
        self._is_first = False
        self._rest = self._decoder.unused_data if self._decoder.eof else self._decoder.unconsumed_tail
        return piece
