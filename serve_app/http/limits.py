"""One request's limits: its body's size and kind, its counts, its time."""

from __future__ import annotations

import asyncio
import codecs
import re
from types import TracebackType

from starlette.types import Receive, Scope

from runtime.output.fields import invalid, shortened
from serve_app.protocol.errors import ApiError
from serve_app.protocol.sampling import SamplingFields
from serve_app.settings import HttpSettings

# Shorter bodies take a few milliseconds to parse, render and tokenise; token ids take less than a thread's start.
# Fields that a template indents may take longer. JSON may spell their names with escapes.
_LONG_BODY_BYTES, _LONG_IDS_BYTES = 8 << 10, 16 << 10
_WRITTEN_OUT = re.compile(rb'"(?:tools|tool_calls|tool_use|chat_template_kwargs)"|\\u')


_CHARSET, _UTF_8 = re.compile(rb'\bcharset\s*=\s*"?([^\s";]*)'), {b"utf-8", b"utf8", b"us-ascii", b"ascii"}


def is_long(body: bytes) -> bool:
    """Return whether a body may take long to parse."""
    rest = body if len(body) >= _LONG_IDS_BYTES else body.translate(None, b"0123456789, ")
    return len(rest) >= _LONG_BODY_BYTES or _WRITTEN_OUT.search(body) is not None


async def read_json_body(scope: Scope, receive: Receive, settings: HttpSettings) -> bytes | None:
    """Return the bytes of a request's JSON, or None if the client left before their end.

    Raises ApiError for a body that is not declared as JSON, is too long or too slow, or exceeds the front's limit for
    all bodies. A Content-Length is checked before the body is read. Browsers send other types than JSON from
    any site's pages without a preflight request."""
    max_bytes, timeout_s = settings.longest_body(scope.get("takes_images", True)), settings.body_timeout_s
    bodies: BodyBytes | None = scope.get("bodies")  # None for a batch's request, which is complete
    headers = dict(scope["headers"])
    kind, _, parameters = headers.get(b"content-type", b"").lower().partition(b";")
    kind = kind.strip()
    if kind != b"application/json":
        has = "no Content-Type" if not kind else f"the Content-Type {shortened(kind.decode('latin-1'))!r}"
        text = f"The request has {has}; send it with the header 'Content-Type: application/json'."
        raise ApiError(415, text, code="unsupported_media_type")
    if (charset := _CHARSET.search(parameters)) and charset[1] not in _UTF_8:
        text = f"The request body has the charset {shortened(charset[1].decode('latin-1'))!r}; send JSON in UTF-8."
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
    if body.startswith(codecs.BOM_UTF8):
        del body[: len(codecs.BOM_UTF8)]
    return bytes(body)


class BodyBytes:
    """The bytes in incomplete request bodies, for each API key and in all."""

    def __init__(self, settings: HttpSettings) -> None:
        self._most, self._most_per_key = settings.max_unread_bytes, settings.max_unread_bytes_per_key
        self._by_owner: dict[str, int] = {}
        self._num_bytes = 0

    def add(self, owner: str, num_bytes: int) -> None:
        """Count more of a body. Raises a limit's 429 without counting."""
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
        """Remove the bytes of a body that is complete or given up."""
        self._num_bytes -= num_bytes
        self._by_owner[owner] -= num_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]


def _too_long(max_bytes: int) -> ApiError:
    return ApiError(413, f"The request body is over {max_bytes} bytes; send less.", code="body_too_large")


def check_priority(priority: int, settings: HttpSettings) -> None:
    """Raise the 400 for a priority above others' unless the settings allow it."""
    if priority < 0 and not settings.client_priority:
        problem = f"is {priority}, but this server does not let clients precede others (client_priority)"
        raise invalid("priority", f"{problem}; the default is 0, and higher values are served later")


def check_counts(request: SamplingFields, settings: HttpSettings) -> None:
    """Raise the 400 for a request with higher counts than the settings allow."""
    check_priority(request.priority, settings)
    num_stops = len(request.stop) if isinstance(request.stop, list) else 1
    for name, what, count, most in (
        ("n", "choices", request.n or 1, settings.max_n),
        ("stop", "stop strings", num_stops, settings.max_stop),
        ("prompt", "prompts", request.num_prompts(), settings.max_prompts),
    ):
        if count > most:
            raise invalid(name, f"has {count} {what}, but this server allows {most}")


class Deadline:
    """Ends its block after `seconds` with the 504."""

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
