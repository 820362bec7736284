"""The response store: each front stores its own responses, and reads others by calls to their fronts.

A response's id names its front. A response is removed at the first of these events:

- its time is over
- newer responses need its memory, and its owner uses more memory than any other owner
- its client deletes it
- its front ends

Nothing is written to a disk."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from runtime.output.fields import invalid, shortened
from serve_app.apis.responses.builder import ResponseBuilder
from serve_app.apis.responses.input_items import ITEMS, encoded
from serve_app.apis.responses.request import ResponsesRequest
from serve_app.protocol.answers import encode_json
from serve_app.protocol.errors import ApiError
from serve_app.protocol.prepared_request import PreparedRequest
from serve_app.settings import HttpSettings

_ID = re.compile(r"resp_([A-Za-z0-9]+)_[A-Za-z0-9._:-]+")
_ENTRY_BYTES = 1 << 10  # an entry's bytes besides its texts
_REFERENCE_BYTES = 8
_ITEM_BYTES = 256  # an item's bytes besides its text: Python's objects for it
_EVENT_BYTES = 64  # an event's bytes besides its text
_PAGE_BYTES = 1 << 20  # events that a reader receives at once
_BUSY_RETRY_S = 1.0
MAX_ITEMS = 20_000  # items in a continued conversation
_POLL_S = 0.05  # seconds between two calls to another front for a running response's events


class Fronts(Protocol):
    """The fronts of the application."""

    own: str  # this front's id

    async def call(self, front: str, method: str, *args: Any) -> Any:
        """Return a method's result from another front's ResponseStore; raises ApiError, a 404 if the front ended."""


class OneFront:
    """A front without others."""

    own = "0"

    async def call(self, front: str, method: str, *args: Any) -> Any:
        raise gone(front)


def gone(front: str) -> ApiError:
    text = f"The front {shortened(front)!r} of this response has ended, and its stored responses with it"
    remedy = "send the request again, for a stream with Last-Event-ID, or the whole conversation as input"
    return ApiError(404, f"{text}; {remedy}.", code="response_not_found")


@dataclass(slots=True, eq=False)
class _SharedItem:
    """An item that conversations of one owner share."""

    text: bytes  # JSON
    num_uses: int = 0


@dataclass(slots=True, eq=False)
class StoredResponse:
    """A stored response, complete or still running in the background."""

    owner: str
    is_background: bool
    num_input: int  # number of input items in `items`
    items: list[_SharedItem]  # the conversation with its answer
    body: bytes = b""  # JSON after its end
    expires_at: float = 0.0  # monotonic clock
    events: list[bytes] | None = None  # a background stream's events; None without a stream
    builder: ResponseBuilder | None = None  # until its end
    task: asyncio.Task[None] | None = None
    num_bytes: int = 0  # bytes in `body` and `events`
    grown: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Shelf:
    """The responses of one owner and their shared items."""

    ended: dict[str, StoredResponse] = field(default_factory=dict)  # oldest first
    items: dict[bytes, _SharedItem] = field(default_factory=dict)
    num_bytes: int = 0  # includes running responses
    num_running: int = 0


class ResponseStore:
    """One front's responses. One thread calls its methods.

    An owner's conversations share their items, so repeated items are stored once."""

    def __init__(self, settings: HttpSettings, front: str = OneFront.own) -> None:
        self.front = front
        self._max_bytes, self._life_s = settings.response_store_bytes, settings.response_life_s
        self._running: dict[str, StoredResponse] = {}
        self._ended: dict[str, StoredResponse] = {}
        self._shelves: dict[str, _Shelf] = {}  # shelves by owner
        self._num_bytes = 0  # bytes on all shelves

    def stores(self, request: ResponsesRequest) -> bool:
        """Return whether the response is stored; raises FieldError if it must be but cannot."""
        if self._max_bytes or not (request.store or request.background or request.previous_response_id):
            return bool(self._max_bytes) and request.store is not False
        name = "store" if request.store else "background" if request.background else "previous_response_id"
        raise invalid(name, "needs stored responses, and this server stores none (response_store_bytes is 0)")

    # ---- what this front does ----------------------------------------------------------------------------------------

    def keep(self, prepared: PreparedRequest[ResponsesRequest], builder: ResponseBuilder) -> bytes | None:
        """Store a response that has ended and return its JSON, or None if the request does not want this."""
        if not self.stores(prepared.request):
            return None
        stored = self._new(prepared)
        self._complete(prepared.id, stored, builder)
        return stored.body

    def begin(self, prepared: PreparedRequest[ResponsesRequest], builder: ResponseBuilder) -> StoredResponse:
        """Store a new background response; raises the 429 without memory for it."""
        stored = self._new(prepared)
        self._make_room()
        if self._num_bytes > self._max_bytes:  # running responses alone exceed it
            self._release(stored)
            text = "The responses that are made in the background fill the store of this front; come back later."
            raise ApiError(429, text, code="response_store_full", retry_after_s=_BUSY_RETRY_S)
        self._running[prepared.id] = stored
        stored.builder = builder
        if prepared.request.stream:
            stored.events = []
        return stored

    def grow(self, response_id: str) -> None:
        """Store the builder's new events, and the whole response at its end."""
        if (stored := self._running.get(response_id)) is None or (builder := stored.builder) is None:
            return
        if stored.events is not None:
            new = builder.take_events()
            stored.events += new
            self._charge(stored, sum(map(len, new)) + _EVENT_BYTES * len(new))
            if self._num_bytes > self._max_bytes:
                self._make_room()
        if builder.has_ended:
            del self._running[response_id]
            self._complete(response_id, stored, builder)
        stored.grown.set()
        stored.grown = asyncio.Event()

    def _new(self, prepared: PreparedRequest[ResponsesRequest]) -> StoredResponse:
        request = prepared.request
        stored = StoredResponse(prepared.owner, bool(request.background), len(request.encoded_items), [])
        self._shelves.setdefault(prepared.owner, _Shelf()).num_running += 1
        self._charge(stored, _ENTRY_BYTES)
        self._add_items(stored, request.encoded_items)
        return stored

    def _complete(self, response_id: str, stored: StoredResponse, builder: ResponseBuilder) -> None:
        self._add_items(stored, encoded(ITEMS.validate_python(builder.output)))
        stored.body = encode_json(builder.object())
        stored.builder = stored.task = None
        stored.expires_at = time.monotonic() + self._life_s
        self._charge(stored, len(stored.body))
        shelf = self._shelves[stored.owner]
        shelf.num_running -= 1
        self._ended[response_id] = shelf.ended[response_id] = stored
        self._make_room()

    def _make_room(self) -> None:
        now = time.monotonic()
        for shelf in list(self._shelves.values()):
            while (oldest := next(iter(shelf.ended), None)) and shelf.ended[oldest].expires_at < now:
                self._remove(oldest)
        while self._num_bytes > self._max_bytes and self._ended:
            largest = max((shelf for shelf in self._shelves.values() if shelf.ended), key=lambda s: s.num_bytes)
            self._remove(next(iter(largest.ended)))

    def _charge(self, stored: StoredResponse, num_bytes: int) -> None:
        stored.num_bytes += num_bytes
        self._count(self._shelves[stored.owner], num_bytes)

    def _count(self, shelf: _Shelf, num_bytes: int) -> None:
        shelf.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def _add_items(self, stored: StoredResponse, texts: list[bytes]) -> None:
        shelf = self._shelves[stored.owner]
        for text in texts:
            if (item := shelf.items.get(text)) is None:
                item = shelf.items[text] = _SharedItem(text)
                self._count(shelf, _ITEM_BYTES + len(text))
            item.num_uses += 1
            stored.items.append(item)
        self._charge(stored, _REFERENCE_BYTES * len(texts))

    def _remove(self, response_id: str) -> None:
        """Remove a response that has ended, unless it is gone already."""
        if (stored := self._ended.pop(response_id, None)) is not None:
            shelf = self._shelves[stored.owner]
            del shelf.ended[response_id]
            shelf.num_running += 1  # until `_release`
            self._release(stored)

    def _release(self, stored: StoredResponse) -> None:
        """Free the memory of a response that is on no list."""
        shelf = self._shelves[stored.owner]
        shelf.num_running -= 1
        self._charge(stored, -stored.num_bytes)
        for item in stored.items:
            item.num_uses -= 1
            if not item.num_uses:
                del shelf.items[item.text]
                self._count(shelf, -_ITEM_BYTES - len(item.text))
        if not (shelf.ended or shelf.num_running):
            del self._shelves[stored.owner]

    # ---- calls by any front ------------------------------------------------------------------------------------------

    def body(self, response_id: str, owner: str) -> bytes:
        """Return the present response as JSON."""
        stored = self._found(response_id, owner)
        return stored.body if stored.builder is None else encode_json(stored.builder.object())

    def conversation(self, response_id: str, owner: str) -> list[bytes]:
        """Return all items up to the end of the response."""
        stored = self._found(response_id, owner)
        if stored.builder is not None:
            text = f"The response {shortened(response_id)!r} is still being made; come back when it is complete."
            raise ApiError(400, text, param="previous_response_id", code="response_in_progress")
        return [item.text for item in stored.items]

    def input_items(self, response_id: str, owner: str) -> list[bytes]:
        """Return the items before the response."""
        stored = self._found(response_id, owner)
        return [item.text for item in stored.items[: stored.num_input]]

    def events(self, response_id: str, owner: str, start: int) -> tuple[list[bytes], bool]:
        """Return a page of the events from number `start` on, and whether no more follow."""
        stored = self._found(response_id, owner)
        if stored.events is None:
            raise invalid("stream", "needs a response that was created with background and stream")
        end, num_bytes = start, 0
        while end < len(stored.events) and num_bytes < _PAGE_BYTES:
            num_bytes += len(stored.events[end])
            end += 1
        return stored.events[start:end], stored.builder is None and end >= len(stored.events)

    def cancel(self, response_id: str, owner: str) -> bytes:
        """End a background response, and return it. A response that has ended stays unchanged."""
        stored = self._found(response_id, owner)
        if stored.builder is not None:
            task = stored.task
            stored.builder.cancel()
            self.grow(response_id)
            if task is not None:
                task.cancel()
        elif not stored.is_background:
            text = "This response was not made in the background; end the request that makes it instead."
            raise ApiError(400, text, code="response_not_in_background")
        return stored.body

    def delete(self, response_id: str, owner: str) -> None:
        """Remove a response, and end it if it still runs."""
        stored = self._found(response_id, owner)
        if stored.builder is not None:
            self.cancel(response_id, owner)  # which may also remove one that is too large
        self._remove(response_id)

    async def news(self, response_id: str) -> None:
        """Wait until a response has new events."""
        if (stored := self._running.get(response_id)) is not None:
            await stored.grown.wait()

    def _found(self, response_id: str, owner: str) -> StoredResponse:
        stored = self._running.get(response_id) or self._ended.get(response_id)
        if stored is not None and stored.builder is None and stored.expires_at < time.monotonic():
            self._remove(response_id)
            stored = None
        if stored is None or stored.owner != owner:
            raise not_found(response_id)
        return stored


def not_found(response_id: str) -> ApiError:
    text = f"There is no response {shortened(response_id)!r}: it was never stored, or is no longer."
    return ApiError(404, text, code="response_not_found")


class StoredResponses:
    """The stored responses of all fronts."""

    def __init__(self, store: ResponseStore, fronts: Fronts) -> None:
        self.store, self._fronts = store, fronts

    async def call(self, method: str, response_id: str, owner: str, *args: Any) -> Any:
        """Return a method's result from the store with a response; raises ApiError and FieldError."""
        front = _front_of(response_id)
        if front == self.store.front:
            return getattr(self.store, method)(response_id, owner, *args)
        return await self._fronts.call(front, method, response_id, owner, *args)

    async def news(self, response_id: str) -> None:
        """Wait until new events are likely."""
        if _front_of(response_id) == self.store.front:
            await self.store.news(response_id)
        else:
            await asyncio.sleep(_POLL_S)


def _front_of(response_id: str) -> str:
    if (match := _ID.fullmatch(response_id)) is None:
        raise not_found(response_id)
    return match[1]
