"""What one request may cost: the size and kind of its body, its counts, its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive, Scope

from serve_app.errors import ApiError, invalid
from serve_app.requests import ChatRequest, CompletionRequest
from serve_app.settings import HttpSettings


async def read_json_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes | None:
    """The bytes of a request's JSON, or None if the client left while sending them.

    Raises ApiError if they are declared to be something else, or are too many: by Content-Length before any is read,
    else as soon as they are."""
    headers = dict(scope["headers"])
    kind = headers.get(b"content-type", b"application/json").partition(b";")[0].strip().lower()
    if kind != b"application/json":
        raise ApiError(415, "The Content-Type of the request must be application/json.", code="unsupported_media_type")
    too_long = ApiError(413, f"The request body is over {max_bytes} bytes; send less.", code="body_too_large")
    length = headers.get(b"content-length", b"")
    if length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
        raise too_long
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > max_bytes:
            raise too_long
        more = message.get("more_body", False)
    return b"".join(parts)


def check_counts(request: CompletionRequest | ChatRequest, settings: HttpSettings) -> None:
    """Raises the 400 for a request that asks for more than the server's settings allow."""
    num_prompts = len(request.prompts()) if isinstance(request, CompletionRequest) else 1
    num_stops = len(request.stop) if isinstance(request.stop, list) else 1
    for name, what, count, most in (
        ("n", "choices", request.n or 1, settings.max_n),
        ("stop", "stop strings", num_stops, settings.max_stop),
        ("prompt", "prompts", num_prompts, settings.max_prompts),
    ):
        if count > most:
            raise invalid(name, f"asks for {count} {what}, but this server allows {most}")


@asynccontextmanager
async def deadline(seconds: float | None) -> AsyncIterator[None]:
    """Ends its body after `seconds` with the 504."""
    try:
        async with asyncio.timeout(seconds) as timeout:
            yield
    except TimeoutError:
        if not timeout.expired():
            raise
        text = f"The answer took longer than this server allows ({seconds:g} s, request_timeout_s)."
        raise ApiError(504, text, type="server_error", code="request_timeout") from None
