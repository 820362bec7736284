"""An engine's adapters (LoRA): each adapter's index on the devices, and which requests may have it.

    reserve  ->  [runners load it]  ->  open   ->  [new requests]
                                    ->  close  ->  [requests that had it before]  ->  release

An adapter is identified by its files' digest. Index 0 is the model itself, without an adapter. Another adapter
gets an index only after `release`, when no request and no step in flight has it. Runners may therefore overwrite it
without a check (C2). Fresh runners get the same adapters at the same indices.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.base.types import CallboardError
from runtime.core.extra import Extra
from runtime.core.request_state import RequestState


class AdapterTable(Extra):
    """Adapters by digest. Not thread-safe: the step thread calls everything."""

    serves = frozenset({"adapter"})

    def __init__(self, max_loras: int) -> None:
        self._free = list(range(max_loras, 0, -1))  # a stack: lowest index on top
        self._indices: dict[str, int] = {}
        self._is_open: dict[str, bool] = {}  # key: digest; absent while the runners do not have the adapter

    def on_add(self, state: RequestState) -> None:
        state.adapter = self.index_of(state.request.adapter)

    @property
    def loaded(self) -> dict[str, int]:
        """The index of each adapter that runners have or are about to have."""
        return dict(self._indices)

    def index_of(self, digest: str) -> int:
        """The index of an adapter, open or closed. Raises CallboardError if the runners do not have it."""
        if not digest:
            return 0
        if digest not in self._is_open:
            raise not_loaded(digest)
        return self._indices[digest]

    def is_open(self, digest: str) -> bool:
        """True if new requests may have it."""
        return not digest or self._is_open.get(digest, False)

    def reserve(self, digest: str) -> int:
        """An index for an adapter that is about to be loaded. Raises CallboardError if there is none left."""
        if digest in self._indices:
            raise CallboardError(f"The adapter {digest} is loaded already, or being loaded; use it as it is.")
        if not self._free:
            raise CallboardError(
                f"There are {len(self._indices)} adapters loaded, as many as max_loras allows; unload one, or start "
                "with a larger max_loras."
            )
        self._indices[digest] = index = self._free.pop()
        return index

    def open(self, digest: str) -> None:
        """The runners have it, and new requests may have it."""
        assert digest in self._indices
        self._is_open[digest] = True

    def close(self, digest: str) -> None:
        """The runners have it, for requests that had it before: on this engine, or on another one that ended."""
        assert digest in self._indices
        self._is_open[digest] = False

    def release(self, digest: str) -> None:
        """Its index is free: nothing has it, and runners may overwrite it."""
        self._is_open.pop(digest, None)
        self._free.append(self._indices.pop(digest))


def is_in_use(index: int, states: Iterable[RequestState]) -> bool:
    """Return True if one of these requests has the adapter."""
    return any(state.adapter == index for state in states)


def not_loaded(digest: str) -> CallboardError:
    """Return the error for a request with an adapter that is not loaded."""
    return CallboardError(f"The adapter {digest} is not loaded; load it again, or request the model itself.")
