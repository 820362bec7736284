"""A client for OpenAI-compatible servers that records when each stream event arrives.

One process reads all streams, so the client parses HTTP/1.1 itself and decodes only the event fields it needs."""

from __future__ import annotations

import asyncio
import json
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from runtime.base.types import CallboardError

_TIMEOUT_S = 10.0  # limit for a request that generates nothing
_ROUNDS = re.compile(r"^vllm:spec_decode_num_drafts_total(?:\{.*\})? (\S+)$", re.MULTILINE)
_ACCEPTED = re.compile(
    r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d+)".*\} (\S+)$', re.MULTILINE
)


@dataclass(slots=True)
class Turn:
    """One request and its times, in seconds of time.perf_counter."""

    prompt: list[int] | str
    max_tokens: int
    images: tuple[str, ...] = ()  # data URLs before the prompt of a chat
    pause: float = 0.0  # before it, after the session's last turn has ended
    sent: float = 0.0
    events: list[float] = field(default_factory=list)  # arrival times of events with output
    ended: float = 0.0  # 0 unless the answer is complete
    num_tokens: int = 0  # output tokens
    num_prompt_tokens: int = 0  # 0 if the server does not report them
    num_cached_tokens: int = 0  # prompt tokens from the server's prefix cache
    error: str = ""


# ---- events ---------------------------------------------------------------------------------------------------------


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: Any = None
    delta: _Delta | None = None

    def has_output(self) -> bool:
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_event_of = msgspec.json.Decoder(_Event).decode


def _error_message(body: bytes) -> str:
    """The message of an error's body, or the body's first characters."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


# ---- one connection -------------------------------------------------------------------------------------------------


class _Connection(asyncio.Protocol):
    """One request at a time over HTTP/1.1, with a chunked body, a known length, or until the connection ends."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, turn: Turn, request: bytes) -> asyncio.Future[None]:
        """Send a request; the future is done when its answer is complete, or has failed."""
        self._turn, self._done = turn, asyncio.get_running_loop().create_future()
        self._status, self._unread, self._line, self._body = 0, b"", b"", b""
        self._left: int | None = None  # body bytes; None unless their number is known
        self._chunked = self._saw_done = False
        self.has_answer = False
        turn.sent = time.perf_counter()
        self.transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        if self._done.done():
            return
        self.has_answer, now, data = True, time.perf_counter(), self._unread + data
        if not self._status:
            head, mark, data = data.partition(b"\r\n\r\n")
            if not mark:
                self._unread = head
                return
            self._read_head(head)
        body, self._unread, is_last = self._body_of(data)
        if self._status == 200:
            self._read_events(body, now)
        else:
            self._body += body
        if is_last:
            self._finish(now)

    def connection_lost(self, error: Exception | None) -> None:
        if not hasattr(self, "_done") or self._done.done():
            return
        if error is None and self._status and not self._chunked and self._left is None:
            self._finish(time.perf_counter())
        else:
            self._fail(ConnectionResetError("The server closed the connection before its answer was complete."))

    def _read_head(self, head: bytes) -> None:
        status, *lines = head.split(b"\r\n")
        self._status = int(status.split()[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self._chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        length = headers.get(b"content-length")
        self._left = None if self._chunked or length is None else int(length)
        self._closes = headers.get(b"connection", b"").lower() == b"close"

    def _body_of(self, data: bytes) -> tuple[bytes, bytes, bool]:
        """The part of the body in `data`, the bytes still to be read, and whether the body is complete."""
        if self._left is not None:
            self._left -= len(data)
            return data, b"", self._left <= 0
        if not self._chunked:
            return data, b"", False
        parts: list[bytes] = []
        at = 0
        while (mark := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:mark].partition(b";")[0], 16)
            end = mark + 2 + size
            if len(data) < end + 2:
                break
            if not size:
                return b"".join(parts), b"", True
            parts.append(data[mark + 2 : end])
            at = end + 2
        return b"".join(parts), data[at:], False

    def _read_events(self, body: bytes, now: float) -> None:
        *lines, self._line = (self._line + body).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self._saw_done = True
                self._turn.ended = now
                continue
            try:
                event = _event_of(data)
            except msgspec.DecodeError:
                self._turn.error = f"The server sent an event that is not one of OpenAI's API: {data[:200]!r}."
                continue
            if event.error is not None:
                self._turn.error = _error_message(data)
            if event.choices and any(choice.has_output() for choice in event.choices):
                self._turn.events.append(now)
            if (usage := event.usage) is not None:
                self._turn.num_tokens = usage.completion_tokens or 0
                self._turn.num_prompt_tokens = usage.prompt_tokens or 0
                if (details := usage.prompt_tokens_details) is not None:
                    self._turn.num_cached_tokens = details.cached_tokens or 0

    def _finish(self, now: float) -> None:
        turn = self._turn
        if self._closes:
            self.transport.close()
        if self._status != 200:
            turn.error = f"{self._status}: {_error_message(self._body)}"
        elif not turn.error and not self._saw_done:
            turn.error = "The stream ended without [DONE]."
        elif not turn.error and not turn.events:
            turn.error = "The answer has no output."
        if turn.error:
            self._fail(CallboardError(turn.error))
            return
        turn.ended, turn.num_tokens = turn.ended or now, turn.num_tokens or len(turn.events)
        self._done.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._turn.ended, self._turn.error = 0.0, str(error)
        self.transport.abort()
        self._done.set_exception(error)


# ---- the client -----------------------------------------------------------------------------------------------------


class Client:
    """Sends each request over an idle connection, or a new one if none is idle."""

    def __init__(
        self, url: str, fields: dict[str, Any] | None = None, *, chat: bool = False, model: str | None = None,
        api_key: str | None = None,
    ) -> None:  # fmt: skip
        """`fields` are added to each request, without them it is greedy; a field of None is left out.

        Raises CallboardError if the server does not answer and `model` is None."""
        self.url = (url if "//" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CallboardError(f"{url!r} is not a URL of a server; send one such as http://127.0.0.1:8000.")
        self._is_tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._is_tls else 80)
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._is_chat = chat
        path = f"{parts.path}/v1/{'chat/completions' if chat else 'completions'}"
        lines = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        self._head = "\r\n".join(lines).encode()
        self.model = model or self._first_model()
        self._fields = {"temperature": 0.0, "ignore_eos": True, "stream": True}
        self._fields |= {"stream_options": {"include_usage": True}} | (fields or {})
        self._idle: list[_Connection] = []

    async def ask(self, turn: Turn) -> None:
        """Return when the answer is complete; raises CallboardError or OSError if it fails."""
        request = self._request(turn)
        while True:
            is_reused = False
            while self._idle and not is_reused:
                connection = self._idle.pop()
                is_reused = not connection.transport.is_closing()
            if not is_reused:
                loop, tls = asyncio.get_running_loop(), self._is_tls or None
                connection = (await loop.create_connection(_Connection, self._host, self._port, ssl=tls))[1]
            try:
                await connection.send(turn, request)
            except asyncio.CancelledError:
                connection.transport.abort()
                raise
            except OSError:
                if not is_reused or connection.has_answer:
                    raise
                turn.error = ""  # the server closed an idle connection while the request was on its way
                continue
            self._idle.append(connection)
            return

    def count_tokens(self, text: str, add_special_tokens: bool) -> int | None:
        """A text's number of tokens by the server's tokenizer; None without a /tokenize route."""
        body = {"model": self.model, "prompt": text, "content": text, "add_special_tokens": add_special_tokens}
        try:
            answer = self._json("/tokenize", body)
            return int(answer["count"] if "count" in answer else len(answer["tokens"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def draft_counts(self) -> list[float]:
        """The server's rounds with draft tokens so far, then their accepted tokens by position; [] if it has none.

        vLLM's metrics, over all engines and requests."""
        try:
            request = urllib.request.Request(f"{self.url}/metrics", headers=self._headers)
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                text = answer.read().decode()
        except (OSError, ValueError):
            return []
        if not (rounds := _ROUNDS.findall(text)):
            return []
        counts = {0: sum(map(float, rounds))}
        for position, accepted in _ACCEPTED.findall(text):
            counts[int(position) + 1] = counts.get(int(position) + 1, 0.0) + float(accepted)
        return [counts.get(i, 0.0) for i in range(max(counts) + 1)]

    def _request(self, turn: Turn) -> bytes:
        content: Any = turn.prompt
        if turn.images:
            images = [{"type": "image_url", "image_url": {"url": url}} for url in turn.images]
            content = [*images, {"type": "text", "text": content}]
        asked = {"messages": [{"role": "user", "content": content}]} if self._is_chat else {"prompt": content}
        body = {"model": self.model, **asked, "max_tokens": turn.max_tokens, **self._fields}
        data = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        return self._head + b"\r\nContent-Length: %d\r\n\r\n" % len(data) + data

    def _first_model(self) -> str:
        try:
            return str(self._json("/v1/models", None)["data"][0]["id"])
        except urllib.error.HTTPError as e:
            message = _error_message(e.read())
            raise CallboardError(f"{self.url}/v1/models answers {e.code}: {message}") from None
        except (OSError, ValueError, KeyError, IndexError, TypeError) as e:
            raise CallboardError(
                f"No OpenAI-compatible server answers at {self.url}: {getattr(e, 'reason', e)}; check the URL."
            ) from None

    def _json(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, self._headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
