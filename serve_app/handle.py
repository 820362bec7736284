"""The application's Serve handle: methods with the HTTP API's bodies and answers."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np
from pydantic import BaseModel
from starlette.types import ASGIApp, Message, Receive

from actors.ray.callers import Caller, Callers, current_call
from runtime.output.fields import FieldError, invalid
from runtime.output.image_forms import data_url, file_of, is_picture
from serve_app.http import in_process
from serve_app.http.lanes import IMAGES
from serve_app.protocol.errors import ApiError, api_error

_LATER = (429, 503)  # the engines are busy, loading or restarting
_STATUSES = {"invalid_request_error": 400, "rate_limit_error": 429, "request_aborted": 499}  # of stream errors

_ITEM_S = 0.002  # seconds between two items, over all streams
_LONGEST_S = 0.1  # seconds between two items of one stream

Answer = dict[str, Any]


class CallError(ApiError, ValueError):
    """An ApiError of a call. ray.data.llm keeps on after a ValueError: with should_continue_on_error the row fails."""

    def __reduce__(self) -> tuple[Any, ...]:
        _, arguments = super().__reduce__()
        return partial(CallError, param=self.param, code=self.code, retry_after_s=self.retry_after_s), arguments


class Turns:
    """Limits the items that a front's streams yield together, since Ray takes 0.5 ms of CPU for each.

    Tokens that come before their stream's turn share its next item."""

    def __init__(self) -> None:
        self.num_streams = 0

    async def wait(self, last: float) -> float:
        """Wait for a stream's turn after its last item, and return the time."""
        if (delay := last + min(self.num_streams * _ITEM_S, _LONGEST_S) - time.monotonic()) > 0:
            await asyncio.sleep(delay)
        return time.monotonic()

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[None]:
        """Count a stream while it runs."""
        self.num_streams += 1
        try:
            yield
        finally:
            self.num_streams -= 1


class HandleCalls:
    """A call takes a dict, a pydantic object or a dataclass, as ray.serve.llm's handles do.

    A picture's URL may be a PIL image, a uint8 array, or a Path on the front's machine.
    `handle.chat.remote(body)` returns the whole answer. `handle.options(stream=True).chat.remote(body)` yields the
    chunks if the body has "stream": true, else the whole answer alone. Raises CallError. A call waits while no engine
    can take it, as Serve's handles wait for a replica."""

    _routes: ASGIApp  # routes without error handlers
    _callers: Callers
    _turns: Turns
    _is_leaving = False  # True if this replica takes no new calls

    async def chat(self, body: Any) -> Answer | AsyncGenerator[Answer, None]:
        """Call /v1/chat/completions."""
        return await self._called("/v1/chat/completions", body)

    async def completions(self, body: Any) -> Answer | AsyncGenerator[Answer, None]:
        """Call /v1/completions."""
        return await self._called("/v1/completions", body)

    async def responses(self, body: Any) -> Answer | AsyncGenerator[Answer, None]:
        """Call /v1/responses."""
        return await self._called("/v1/responses", body)

    async def embeddings(self, body: Any) -> Answer | AsyncGenerator[Answer, None]:
        """Call /v1/embeddings."""
        return await self._called("/v1/embeddings", body)

    async def score(self, body: Any) -> Answer | AsyncGenerator[Answer, None]:
        """Call /v1/score."""
        return await self._called("/v1/score", body)

    async def leaves(self, caller: Caller | None) -> Message:
        """Return ASGI's message for a client that has left when this caller has ended."""
        await self._callers.end(caller)
        return {"type": "http.disconnect"}

    async def _called(self, path: str, body: Any) -> Answer | AsyncGenerator[Answer, None]:
        call = current_call()
        content = await encoded(body)
        answers = self._answers(path, content, call.caller)
        if call.is_streamed:
            return answers
        if _wants_stream(content):
            raise _call_error(invalid("stream", "is true; call handle.options(stream=True), or leave it out"))
        async with aclosing(answers):
            async for answer in answers:
                return answer
        raise CallError(499, "The caller of this request has ended.", code="request_aborted")

    async def _answers(self, path: str, content: bytes, caller: Caller | None) -> AsyncGenerator[Answer, None]:
        """Yield the objects of an answer: its chunks, or the whole one."""
        leaves, has_begun = partial(self.leaves, caller), False
        while True:
            try:
                posted = _posted(self._routes, path, content, leaves, self._turns)
                async with aclosing(posted) as answers:
                    async for answer in answers:
                        has_begun = True
                        yield answer
                return
            except (ApiError, FieldError) as e:
                error = _call_error(e)
                if has_begun or self._is_leaving or error.status not in _LATER or error.retry_after_s is None:
                    raise error from None
                with suppress(TimeoutError):
                    await asyncio.wait_for(leaves(), error.retry_after_s)
                    return


async def _posted(
    routes: ASGIApp, path: str, content: bytes, leaves: Receive, turns: Turns
) -> AsyncGenerator[Answer, None]:
    """Yield the objects of a route's answer, which ends with this generator."""
    pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
    is_stream, last = False, 0.0

    async def send(message: Message) -> None:
        nonlocal is_stream, last
        if message["type"] == "http.response.start":
            if is_stream := dict(message["headers"])[b"content-type"].startswith(b"text/event-stream"):
                await stack.enter_async_context(turns.stream())
        elif piece := message.get("body"):
            if is_stream:
                last = await turns.wait(last)
            pieces.put_nowait(piece)

    async with AsyncExitStack() as stack:
        task = asyncio.create_task(in_process.post(routes, path, content, send, leaves=leaves))
        task.add_done_callback(lambda _: pieces.put_nowait(None))
        stack.callback(task.cancel)
        while (piece := await pieces.get()) is not None:
            if not is_stream:
                yield msgspec.json.decode(piece)
                continue
            for line in piece.split(b"\n"):
                if line.startswith(b"data: {"):
                    yield _checked(msgspec.json.decode(line[6:]))
        await task  # raises the error if a route has not answered


def _checked(event: Answer) -> Answer:
    """Return an event of a stream; raises the error that ends it."""
    if (error := event.get("error")) is None or "type" in event:  # a response has its own events for errors
        return event
    status = _STATUSES.get(error["type"], 500)
    raise CallError(status, error["message"], param=error["param"], code=error["code"])


class _Streamed(msgspec.Struct):
    stream: Any = None


def _wants_stream(content: bytes) -> bool:
    with suppress(msgspec.DecodeError):  # the route reports it
        return msgspec.json.decode(content, type=_Streamed).stream is True
    return False


def _call_error(error: ApiError | FieldError) -> CallError:
    found = api_error(error) if isinstance(error, FieldError) else error
    return CallError(
        found.status, found.message(), param=found.param, code=found.code, retry_after_s=found.retry_after_s
    )


async def encoded(body: Any) -> bytes:
    """Return a body as JSON, with pictures as data URLs; raises CallError for a value that JSON lacks."""
    try:
        try:
            return _encode(body)
        except _HasPicture:
            return await IMAGES.run("", partial(_encode_pictures, body))
    except FieldError as e:
        raise _call_error(e) from None
    except (TypeError, ValueError) as e:
        raise CallError(400, f"The request body is not JSON: {e}; send plain values.", code="invalid_json") from None


class _HasPicture(Exception):
    """A body has a picture, and the event loop writes no image files."""


def _plain(value: Any) -> Any:
    """Return a value as JSON's own ones: pydantic objects, and the arrays and numbers of Ray Data's rows."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    if is_picture(value):
        raise _HasPicture
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not one of its types")


def _plain_or_picture(value: Any) -> Any:
    return data_url(base64.b64encode(file_of("image", value)).decode()) if is_picture(value) else _plain(value)


_encode = msgspec.json.Encoder(enc_hook=_plain).encode
_encode_pictures = msgspec.json.Encoder(enc_hook=_plain_or_picture).encode
