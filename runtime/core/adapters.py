"""The adapters (LoRA) of an engine: which index on the devices each has, and which requests may ask for.

    reserve  ->  [runners load it]  ->  open  ->  [requests]  ->  close  ->  [the last one ends]  ->  release

An adapter goes by the digest of its files. Index 0 is the model itself, without one. An index is given to another
adapter only after `release`, when no request and no step in flight has it any more, so that runners may overwrite what
is there without asking (C2). After the runners' death the same adapters get the same indices, from `loaded`.
"""

from __future__ import annotations

from runtime.core.types import CallboardError


class AdapterTable:
    """Adapters by digest. Not thread-safe: the step thread calls everything."""

    def __init__(self, max_loras: int) -> None:
        self._free = list(range(max_loras, 0, -1))  # a stack: lowest index on top
        self._indices: dict[str, int] = {}
        self._open: set[str] = set()

    @property
    def loaded(self) -> dict[str, int]:
        """The index of each adapter that runners hold or are about to."""
        return dict(self._indices)

    def index_of(self, digest: str) -> int:
        """Where rows of a request find its adapter. Raises CallboardError if requests may not ask for it."""
        if not digest:
            return 0
        if digest not in self._open:
            raise CallboardError(f"The adapter {digest} is not loaded; load it again, or ask for the model itself.")
        return self._indices[digest]

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
        """The runners have it: requests may ask for it."""
        assert digest in self._indices
        self._open.add(digest)

    def close(self, digest: str) -> None:
        """No new request gets it; those that have it go on."""
        self._open.discard(digest)

    def release(self, digest: str) -> None:
        """Its index is free: nothing has it, and runners may forget what is there."""
        self.close(digest)
        self._free.append(self._indices.pop(digest))
