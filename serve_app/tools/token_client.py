"""A client that records token ids with their times, and counts lost connections.

After a lost connection the client sends the prompt again with all received tokens. Noise depends on the position (C4),
so the answer continues as before, and each token arrives once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from runtime.base.types import CallboardError

_RETRY_S = 0.1  # pause after an answer with a retryable status, or a refused connection
_LIMIT_BYTES = 1 << 20  # longest line


class _Choice(msgspec.Struct):
    token_ids: list[int] = []
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """The fields of an event that this client reads."""

    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


_event_of = msgspec.json.Decoder(_Event).decode


class Server(NamedTuple):
    """A server's address, its model, and each request's headers."""

    host: str
    port: int
    model: str
    headers: dict[str, str]

    async def request(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return a whole answer; raises OSError or _RefusedError."""
        reader, writer = await self.open(method, path, body)
        try:
            text = b"".join([part async for part in _body(reader)])
            return dict(msgspec.json.decode(text))
        finally:
            writer.close()

    async def open(
        self, method: str, path: str, body: dict[str, Any]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return a connection before the headers of a 200; raises OSError, or _RefusedError for another status."""
        content = msgspec.json.encode(body) if body else b""
        headers = {"host": f"{self.host}:{self.port}", "content-type": "application/json", **self.headers}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        head = "\r\n".join([*lines, f"content-length: {len(content)}", "connection: close", "", ""])
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=_LIMIT_BYTES)
        try:
            writer.write(head.encode() + content)
            status = (await reader.readline()).split()
            if len(status) < 2:
                raise ConnectionResetError("the connection ended without an answer")
            if status[1] != b"200":
                raise _RefusedError(int(status[1]), (await reader.read(_LIMIT_BYTES)).decode(errors="replace"))
        except BaseException:
            writer.close()
            raise
        return reader, writer


class _RefusedError(CallboardError):
    """An answer with another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(slots=True, eq=False)
class Reading:
    """One request and its received answer. `sampling` are fields of the request."""

    prompt: list[int]
    max_tokens: int
    sampling: dict[str, Any]
    on_tokens: Callable[[Reading, list[int]], None] = lambda *_: None
    tokens: list[int] = field(default_factory=list)
    times: list[tuple[float, int]] = field(default_factory=list)  # arrival times and their token counts
    num_cuts: int = 0  # connections that ended before the answer
    num_refusals: int = 0  # answers with a retryable status, and refused connections
    error: str = ""  # why it finally failed
    cut_at: float = 0.0  # time of the first cut

    async def read(self, server: Server, reads: asyncio.Event | None = None) -> None:
        """Read until the answer is complete or fails. While `reads` is not set, reading pauses."""
        while not self.error and len(self.tokens) < self.max_tokens:
            try:
                await self._ask(server, reads)
                return
            except _RefusedError as e:
                if e.status < 429:
                    self.error = str(e)[-300:]
                self.num_refusals += 1
            except (OSError, asyncio.IncompleteReadError) as e:
                if len(self.tokens) == self.max_tokens:
                    return
                if isinstance(e, ConnectionRefusedError):
                    self.num_refusals += 1
                else:
                    self.num_cuts += 1
                    self.cut_at = self.cut_at or time.monotonic()
            await asyncio.sleep(_RETRY_S)

    async def _ask(self, server: Server, reads: asyncio.Event | None) -> None:
        prompt, max_tokens = self.prompt + self.tokens, self.max_tokens - len(self.tokens)
        fields = {"stream": True, "ignore_eos": True, "return_token_ids": True, **self.sampling}
        body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, **fields}
        reader, writer = await server.open("POST", "/v1/completions", body)
        try:
            unread = b""
            async for part in _body(reader):
                *events, unread = (unread + part).split(b"\n\n")
                for event in events:
                    if event.startswith(b"data: {"):
                        self._take(_event_of(event[6:]))
                if reads is not None:
                    await reads.wait()
        finally:
            writer.close()
        if not self.error and len(self.tokens) < self.max_tokens:
            raise ConnectionResetError("the stream ended early")

    def _take(self, event: _Event) -> None:
        if event.error is not None:
            self.error = str(event.error.get("message"))
        for choice in event.choices:
            if choice.token_ids:
                self.tokens += choice.token_ids
                self.times.append((time.monotonic(), len(choice.token_ids)))
                self.on_tokens(self, choice.token_ids)


async def _body(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the pieces of an answer's body; raises IncompleteReadError if it is cut off."""
    length = -1
    while line := (await reader.readline()).strip().lower():
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    if length >= 0:
        yield await reader.readexactly(length)
        return
    while True:
        line = await reader.readline()
        if not line.strip():
            raise asyncio.IncompleteReadError(b"", None)
        size = int(line, 16)
        data = await reader.readexactly(size + 2)
        if not size:
            return
        yield data[:-2]


async def first_model(host: str, port: int, headers: dict[str, str]) -> tuple[Server, int]:
    """Return a server with its model, and the context's length; raises CallboardError without an answer."""
    server = Server(host, port, "", headers)
    try:
        model = (await server.request("GET", "/v1/models", {}))["data"][0]
        return server._replace(model=model["id"]), int(model["max_model_len"])
    except (OSError, EOFError, KeyError, IndexError, _RefusedError, ValueError) as e:
        raise CallboardError(f"No Callboard server answers at {host}:{port} ({e or type(e).__name__}).") from e
