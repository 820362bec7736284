"""Grammars and images on one connection: each travels once, and messages name it by its key.

    KeyedSender                                              KeyedStore
    frames([a, b]) --- KeyedUpdate(added a, b) ----------->  holds a, b
                   --- messages that name a or b ---------->  a or b, whole
    frames([c])    --- KeyedUpdate(added c, removed a) ---->  holds b, c

The sender alone decides what the store holds. It adds what a message names before that message. Beyond a limit in
bytes for each kind, it removes the values that were named longest ago. Both ends begin empty with each connection, so
new links and processes start in agreement. A message's reader keeps the value itself, so that a later removal does not
concern it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import TypeVar

import msgspec

from runtime.base.images import Image
from runtime.base.types import CallboardError, Grammar

MAX_UPDATE_BYTES = 16 << 20  # bytes in an update with several values: a frame stays far below its limit
_LIMITS = {Grammar: 16 << 20, Image: 256 << 20}  # bytes that one connection's store keeps between messages

_Keyed = TypeVar("_Keyed", Grammar, Image)


class KeyedUpdate(msgspec.Struct, array_like=True, tag=16):
    """The receiver drops the values with the keys in `removed`, then stores `added`."""

    added: list[Grammar | Image]
    removed: list[str]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(KeyedUpdate).decode
_HEAD = _encode(KeyedUpdate([], []))[:2]  # no other message of these connections begins so


class KeyedSender:
    """The keys that the store at the other end of a connection holds."""

    def __init__(self, limits: Mapping[type, int] | None = None) -> None:
        self._limits = limits or _LIMITS
        # Each kind's sizes by key, the one named longest ago first.
        self._sizes: dict[type, OrderedDict[str, int]] = {kind: OrderedDict() for kind in self._limits}
        self.num_bytes = dict.fromkeys(self._limits, 0)  # bytes of each kind's values there

    def frames(self, values: Iterable[Grammar | Image]) -> list[bytes]:
        """Return the frames to send before a message that names `values`.

        Raises UnicodeError, without an effect, if a grammar's text cannot be sent."""
        named = {value.key: (value, value.num_bytes) for value in values}
        updates, size = [KeyedUpdate([], [])], 0
        for key, (value, num_bytes) in named.items():
            sizes = self._sizes[type(value)]
            if key in sizes:
                sizes.move_to_end(key)
                continue
            sizes[key] = num_bytes
            self.num_bytes[type(value)] += num_bytes
            size += num_bytes
            if updates[-1].added and size > MAX_UPDATE_BYTES:
                updates.append(KeyedUpdate([], []))
                size = num_bytes
            updates[-1].added.append(value)
        for kind, sizes in self._sizes.items():
            while self.num_bytes[kind] > self._limits[kind] and next(iter(sizes)) not in named:
                key, num_bytes = sizes.popitem(last=False)
                self.num_bytes[kind] -= num_bytes
                updates[0].removed.append(key)
        return [_encode(update) for update in updates if update.added or update.removed]


class KeyedStore:
    """The values that have arrived on a connection and were not removed."""

    def __init__(self) -> None:
        self.values: dict[str, Grammar | Image] = {}  # values by key

    def take(self, frame: bytes | bytearray) -> bool:
        """Apply a frame of KeyedSender. Returns False for any other message. Raises msgspec.DecodeError."""
        if frame[:2] != _HEAD:
            return False
        update = _decode(frame)
        for key in update.removed:
            self.values.pop(key, None)
        self.values.update((value.key, value) for value in update.added)
        return True

    def whole(self, value: _Keyed) -> _Keyed:
        """Return the value that a message names. Raises CallboardError if it was not sent."""
        found = self.values.get(value.key)
        if not isinstance(found, type(value)):
            kind = type(value).__name__.lower()
            raise CallboardError(f"A message names the {kind} {value.key!r}, which was not sent before it.")
        return found
