"""The limits of one request: the size and kind of its body, its counts, its time."""

from __future__ import annotations

import asyncio
import re
from types import TracebackType

from starlette.types import Receive, Scope

from runtime.output.fields import invalid, shortened
from serve_app.protocol.errors import ApiError
from serve_app.protocol.sampling import SamplingFields
from serve_app.settings import HttpSettings

# A shorter body is parsed, templated and tokenised in a few milliseconds, token ids in less than it takes to wake up a
# thread, but not fields that a template writes out with indents. A name may be spelled with escapes, too.
_LONG_BODY_BYTES, _LONG_IDS_BYTES = 8 << 10, 16 << 10
_WRITTEN_OUT = re.compile(rb'"(?:tools|tool_calls|tool_use|chat_template_kwargs)"|\\u')


def is_long(body: bytes) -> bool:
    """True if a request of this body may take a while to read."""
    rest = body if len(body) >= _LONG_IDS_BYTES else body.translate(None, b"0123456789, ")
    return len(rest) >= _LONG_BODY_BYTES or _WRITTEN_OUT.search(body) is not None


async def read_json_body(scope: Scope, receive: Receive, settings: HttpSettings) -> bytes | None:
    """The bytes of a request's JSON, or None if the client left while sending them.

    Raises ApiError if they are not declared to be JSON, if they are too many (by Content-Length before any is read,
    else as soon as they are), if they take too long to come, and if the front receives too much at once. Pages of other
    sites can send any kind but JSON without asking the server first."""
    max_bytes, timeout_s = settings.max_body_bytes, settings.body_timeout_s
    bodies: BodyBytes | None = scope.get("bodies")  # none for a request of a batch, whose body is there
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        has = "no Content-Type" if not kind else f"the Content-Type {shortened(kind.decode('latin-1'))!r}"
        text = f"The request has {has}; send it with the header 'Content-Type: application/json'."
        raise ApiError(415, text, code="unsupported_media_type")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
        raise _too_long(max_bytes)
    body, has_more, num_counted = bytearray(), True, 0
    try:
        async with asyncio.timeout(timeout_s):
            while has_more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                piece = message.get("body", b"")
                has_more = message.get("more_body", False)
                if len(body) + len(piece) > max_bytes:
                    raise _too_long(max_bytes)
                if has_more and bodies is not None:
                    bodies.add(scope["owner"], len(piece))
                    num_counted += len(piece)
                body += piece
    except TimeoutError:
        text = f"The request body took longer than {timeout_s:g} seconds (body_timeout_s); send it faster or send less."
        raise ApiError(408, text, code="body_timeout") from None
    finally:
        if num_counted and bodies is not None:
            bodies.remove(scope["owner"], num_counted)
    return bytes(body)


class BodyBytes:
    """The bytes of request bodies that have not come whole yet, of each API key and in all."""

    def __init__(self, settings: HttpSettings) -> None:
        self._most, self._most_per_key = settings.max_unread_bytes, settings.max_unread_bytes_per_key
        self._by_owner: dict[str, int] = {}
        self._num_bytes = 0

    def add(self, owner: str, num_bytes: int) -> None:
        """Count more of a body. Raises the 429 of a limit, and counts nothing then."""
        of_owner = self._by_owner.get(owner, 0) + num_bytes
        for what, count, most, limit in (
            ("Your API key sends", of_owner, self._most_per_key, "max_unread_bytes_per_key"),
            ("All API keys send", self._num_bytes + num_bytes, self._most, "max_unread_bytes"),
        ):
            if count > most:
                text = f"{what} request bodies of {count} bytes at once, over the limit of {most} ({limit})"
                raise ApiError(429, f"{text}; try again later.", code="too_many_bodies", retry_after_s=1.0)
        self._by_owner[owner] = of_owner
        self._num_bytes += num_bytes

    def remove(self, owner: str, num_bytes: int) -> None:
        """A body has come whole, or is given up."""
        self._num_bytes -= num_bytes
        self._by_owner[owner] -= num_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"The request body is over {max_bytes} bytes; send less.", code="body_too_large")


def check_priority(priority: int, settings: HttpSettings) -> None:
    """Raises the 400 for a request that would go before others where no client may."""
    if priority < 0 and not settings.client_priority:
        problem = f"is {priority}, but this server lets no client go before others (client_priority)"
        raise invalid("priority", f"{problem}; 0 is the usual one, and what is above it is served later")


def check_counts(request: SamplingFields, settings: HttpSettings) -> None:
    """Raises the 400 for a request that asks for more than the server's settings allow."""
    check_priority(request.priority, settings)
    num_stops = len(request.stop) if isinstance(request.stop, list) else 1
    for name, what, count, most in (
        ("n", "choices", request.n or 1, settings.max_n),
        ("stop", "stop strings", num_stops, settings.max_stop),
        ("prompt", "prompts", request.num_prompts(), settings.max_prompts),
    ):
        if count > most:
            raise invalid(name, f"asks for {count} {what}, but this server allows {most}")


class Deadline:
    """Ends its body after `seconds` with the 504."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._timeout = None if seconds is None else asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        if self._timeout is not None:
            await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._timeout is not None:
                await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            text = f"The answer took longer than this server allows ({self._seconds:g} s, request_timeout_s)."
            raise ApiError(504, text, code="request_timeout") from None
