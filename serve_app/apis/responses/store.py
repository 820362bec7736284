"""The store of responses: each front keeps those that it has made, and asks the others for theirs.

The id of a response names the front that keeps it. A response is kept until its time is over, newer ones need its
place, its client deletes it or its front ends, whatever comes first. Nothing is written to a disk.

A response goes for newer ones only if its owner holds more than any other owner.
"""

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
_ENTRY_BYTES = 1 << 10  # of an entry, beside its texts
_REFERENCE_BYTES = 8
_ITEM_BYTES = 256  # of an item, beside its text: Python's objects for it
_EVENT_BYTES = 64  # of an event, beside its text
_PAGE_BYTES = 1 << 20  # of the events that a reader gets at once
_BUSY_RETRY_S = 1.0
MAX_ITEMS = 20_000  # of a conversation that a request continues
_ASK_AGAIN_S = 0.05  # another front, for the events of a response that it makes


class Fronts(Protocol):
    """The fronts of the application."""

    own: str  # the id of this one

    async def ask(self, front: str, method: str, *args: Any) -> Any:
        """The result of a method of another front's ResponseStore; raises ApiError, the 404 if there is no such front
        any more."""


class OneFront:
    """A front without others."""

    own = "0"

    async def ask(self, front: str, method: str, *args: Any) -> Any:
        raise gone(front)


def gone(front: str) -> ApiError:
    text = f"The front {shortened(front)!r}, which kept this response, has ended, and its responses with it."
    return ApiError(404, f"{text} Send the whole conversation as input.", code="response_not_found")


@dataclass(slots=True, eq=False)
class _Item:
    """An item that conversations of one owner share."""

    text: bytes  # JSON
    num_uses: int = 0


@dataclass(slots=True, eq=False)
class Kept:
    """A response that is kept, or still made in the background."""

    owner: str
    is_background: bool
    num_input: int  # of `items`
    items: list[_Item]  # the conversation, its answer included
    body: bytes = b""  # once it has ended
    expires_at: float = 0.0  # of the monotonic clock
    events: list[bytes] | None = None  # all, by their numbers, if it was asked for as a stream in the background
    builder: ResponseBuilder | None = None  # while it is made
    task: asyncio.Task[None] | None = None
    num_bytes: int = 0  # of `body` and `events`
    grown: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Shelf:
    """The responses of one owner, and the items that they share."""

    ended: dict[str, Kept] = field(default_factory=dict)  # oldest first
    items: dict[bytes, _Item] = field(default_factory=dict)
    num_bytes: int = 0  # of running responses too
    num_running: int = 0


class ResponseStore:
    """The responses of one front. Its methods are called on one thread.

    The conversations of an owner share their items: what a client sends again and again, or refers to, is kept once."""

    def __init__(self, settings: HttpSettings, front: str = OneFront.own) -> None:
        self.front = front
        self._max_bytes, self._life_s = settings.response_store_bytes, settings.response_life_s
        self._running: dict[str, Kept] = {}
        self._ended: dict[str, Kept] = {}
        self._shelves: dict[str, _Shelf] = {}  # by owner
        self._num_bytes = 0  # of all shelves

    def keeps(self, request: ResponsesRequest) -> bool:
        """Whether the response is kept; raises FieldError if it must be and cannot."""
        if self._max_bytes or not (request.store or request.background or request.previous_response_id):
            return bool(self._max_bytes) and request.store is not False
        name = "store" if request.store else "background" if request.background else "previous_response_id"
        raise invalid(name, "needs stored responses, and this server stores none (response_store_bytes is 0)")

    # ---- what this front does ----------------------------------------------------------------------------------------

    def keep(self, prepared: PreparedRequest[ResponsesRequest], builder: ResponseBuilder) -> bytes | None:
        """Keep a response that has ended, if that was asked for; returns it as JSON then."""
        if not self.keeps(prepared.request):
            return None
        kept = self._new(prepared)
        self._complete(prepared.id, kept, builder)
        return kept.body

    def begin(self, prepared: PreparedRequest[ResponsesRequest], builder: ResponseBuilder) -> Kept:
        """Keep a response that is made in the background from now on; raises the 429 if there is no room for it."""
        kept = self._new(prepared)
        self._make_room()
        if self._num_bytes > self._max_bytes:  # of running responses alone
            self._release(kept)
            text = "The responses that are made in the background fill the store of this front; come back later."
            raise ApiError(429, text, code="response_store_full", retry_after_s=_BUSY_RETRY_S)
        self._running[prepared.id] = kept
        kept.builder = builder
        if prepared.request.stream:
            kept.events = []
        return kept

    def grow(self, response_id: str) -> None:
        """The builder of a response has new events, or has ended."""
        if (kept := self._running.get(response_id)) is None or (builder := kept.builder) is None:
            return
        if kept.events is not None:
            new = builder.take_events()
            kept.events += new
            self._charge(kept, sum(map(len, new)) + _EVENT_BYTES * len(new))
            if self._num_bytes > self._max_bytes:
                self._make_room()
        if builder.has_ended:
            del self._running[response_id]
            self._complete(response_id, kept, builder)
        kept.grown.set()
        kept.grown = asyncio.Event()

    def _new(self, prepared: PreparedRequest[ResponsesRequest]) -> Kept:
        request = prepared.request
        kept = Kept(prepared.owner, bool(request.background), len(request.encoded_items), [])
        self._shelves.setdefault(prepared.owner, _Shelf()).num_running += 1
        self._charge(kept, _ENTRY_BYTES)
        self._add_items(kept, request.encoded_items)
        return kept

    def _complete(self, response_id: str, kept: Kept, builder: ResponseBuilder) -> None:
        self._add_items(kept, encoded(ITEMS.validate_python(builder.output)))
        kept.body = encode_json(builder.object())
        kept.builder = kept.task = None
        kept.expires_at = time.monotonic() + self._life_s
        self._charge(kept, len(kept.body))
        shelf = self._shelves[kept.owner]
        shelf.num_running -= 1
        self._ended[response_id] = shelf.ended[response_id] = kept
        self._make_room()

    def _make_room(self) -> None:
        now = time.monotonic()
        for shelf in list(self._shelves.values()):
            while (oldest := next(iter(shelf.ended), None)) and shelf.ended[oldest].expires_at < now:
                self._remove(oldest)
        while self._num_bytes > self._max_bytes and self._ended:
            largest = max((shelf for shelf in self._shelves.values() if shelf.ended), key=lambda s: s.num_bytes)
            self._remove(next(iter(largest.ended)))

    def _charge(self, kept: Kept, num_bytes: int) -> None:
        kept.num_bytes += num_bytes
        self._count(self._shelves[kept.owner], num_bytes)

    def _count(self, shelf: _Shelf, num_bytes: int) -> None:
        shelf.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def _add_items(self, kept: Kept, texts: list[bytes]) -> None:
        shelf = self._shelves[kept.owner]
        for text in texts:
            if (item := shelf.items.get(text)) is None:
                item = shelf.items[text] = _Item(text)
                self._count(shelf, _ITEM_BYTES + len(text))
            item.num_uses += 1
            kept.items.append(item)
        self._charge(kept, _REFERENCE_BYTES * len(texts))

    def _remove(self, response_id: str) -> None:
        """Forget a response that has ended, if it is still there."""
        if (kept := self._ended.pop(response_id, None)) is not None:
            shelf = self._shelves[kept.owner]
            del shelf.ended[response_id]
            shelf.num_running += 1  # until it is released
            self._release(kept)

    def _release(self, kept: Kept) -> None:
        """What a response that is on no list any more has taken."""
        shelf = self._shelves[kept.owner]
        shelf.num_running -= 1
        self._charge(kept, -kept.num_bytes)
        for item in kept.items:
            item.num_uses -= 1
            if not item.num_uses:
                del shelf.items[item.text]
                self._count(shelf, -_ITEM_BYTES - len(item.text))
        if not (shelf.ended or shelf.num_running):
            del self._shelves[kept.owner]

    # ---- what any front may ask --------------------------------------------------------------------------------------

    def body(self, response_id: str, owner: str) -> bytes:
        """The response as it is now, as JSON."""
        kept = self._found(response_id, owner)
        return kept.body if kept.builder is None else encode_json(kept.builder.object())

    def conversation(self, response_id: str, owner: str) -> list[bytes]:
        """All items up to the end of the response."""
        kept = self._found(response_id, owner)
        if kept.builder is not None:
            text = f"The response {shortened(response_id)!r} is still being made; come back when it is complete."
            raise ApiError(400, text, param="previous_response_id", code="response_in_progress")
        return [item.text for item in kept.items]

    def input_items(self, response_id: str, owner: str) -> list[bytes]:
        """The items before the response."""
        kept = self._found(response_id, owner)
        return [item.text for item in kept.items[: kept.num_input]]

    def events(self, response_id: str, owner: str, start: int) -> tuple[list[bytes], bool]:
        """Events from number `start` on, those that there are or the first of many, and whether they are all."""
        kept = self._found(response_id, owner)
        if kept.events is None:
            raise invalid("stream", "is only there for a response that was made with background and stream")
        end, num_bytes = start, 0
        while end < len(kept.events) and num_bytes < _PAGE_BYTES:
            num_bytes += len(kept.events[end])
            end += 1
        return kept.events[start:end], kept.builder is None and end >= len(kept.events)

    def cancel(self, response_id: str, owner: str) -> bytes:
        """The response, which ends now if it is made in the background; one that has ended stays as it is."""
        kept = self._found(response_id, owner)
        if kept.builder is not None:
            task = kept.task
            kept.builder.cancel()
            self.grow(response_id)
            if task is not None:
                task.cancel()
        elif not kept.is_background:
            text = "This response was not made in the background; end the request that makes it instead."
            raise ApiError(400, text, code="response_not_in_background")
        return kept.body

    def delete(self, response_id: str, owner: str) -> None:
        """Forget a response, and end it if it is still made."""
        kept = self._found(response_id, owner)
        if kept.builder is not None:
            self.cancel(response_id, owner)  # and with its end, one that is too large for the store is gone
        self._remove(response_id)

    async def news(self, response_id: str) -> None:
        """Returns when a response has new events."""
        if (kept := self._running.get(response_id)) is not None:
            await kept.grown.wait()

    def _found(self, response_id: str, owner: str) -> Kept:
        kept = self._running.get(response_id) or self._ended.get(response_id)
        if kept is not None and kept.builder is None and kept.expires_at < time.monotonic():
            self._remove(response_id)
            kept = None
        if kept is None or kept.owner != owner:
            raise not_found(response_id)
        return kept


def not_found(response_id: str) -> ApiError:
    text = f"There is no response {shortened(response_id)!r}: it was never stored, or is no longer."
    return ApiError(404, text, code="response_not_found")


class StoredResponses:
    """The responses that the fronts of the application keep."""

    def __init__(self, store: ResponseStore, fronts: Fronts) -> None:
        self.store, self._fronts = store, fronts

    async def ask(self, method: str, response_id: str, owner: str, *args: Any) -> Any:
        """The result of a method of the store that keeps a response; raises ApiError and FieldError."""
        front = _front_of(response_id)
        if front == self.store.front:
            return getattr(self.store, method)(response_id, owner, *args)
        return await self._fronts.ask(front, method, response_id, owner, *args)

    async def news(self, response_id: str) -> None:
        """Returns when it may be worth asking for new events."""
        if _front_of(response_id) == self.store.front:
            await self.store.news(response_id)
        else:
            await asyncio.sleep(_ASK_AGAIN_S)


def _front_of(response_id: str) -> str:
    if (match := _ID.fullmatch(response_id)) is None:
        raise not_found(response_id)
    return match[1]
