"""The index of each API key's files and batches, and their limits.

Each key has a folder with an empty entry for each of its files and batches. An entry's name holds the id and its bytes,
so listing and counting do not open any record."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from serve_app.protocol.errors import ApiError
from serve_app.settings import HttpSettings

_PREFIX = "key-"  # begins a key's folder name; requests without a key have an empty owner


class KeyIndex:
    """All keys' entries. Methods that change entries need the store's lock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ids(self, owner: str, prefix: str) -> list[str]:
        """Return the ids of a key's entries with this prefix, oldest first."""
        return sorted(record_id for record_id in self._entries(owner) if record_id.startswith(prefix))

    def owners(self) -> list[str]:
        """Return the owners with a folder."""
        return [name.removeprefix(_PREFIX) for name in os.listdir(self._folder) if name.startswith(_PREFIX)]

    def sizes(self, owner: str) -> dict[str, int]:
        """Return the bytes that count for each of a key's entries."""
        return {record_id: int(name.partition(".")[2] or 0) for record_id, name in self._entries(owner).items()}

    def set(self, owner: str, record_id: str, num_bytes: int) -> None:
        """Add an entry, or change the bytes of an existing one."""
        folder = self._of(owner)
        new = folder / f"{record_id}.{num_bytes}"
        if (old := self._entries(owner).get(record_id)) is None:
            folder.mkdir(mode=0o700, exist_ok=True)
            new.touch()
        else:
            os.replace(folder / old, new)

    def remove(self, owner: str, record_ids: Iterable[str]) -> None:
        """Remove entries; an id without one is skipped."""
        entries = self._entries(owner)
        for record_id in record_ids:
            if (name := entries.get(record_id)) is not None:
                (self._of(owner) / name).unlink(missing_ok=True)

    def _entries(self, owner: str) -> dict[str, str]:
        """The names of a key's entries by their ids."""
        with suppress(FileNotFoundError):
            return {name.partition(".")[0]: name for name in os.listdir(self._of(owner))}
        return {}

    def _of(self, owner: str) -> Path:
        return self._folder / f"{_PREFIX}{owner}"


@dataclass(slots=True)
class StorageUsage:
    """The usage of a key, present or requested: open batches, files and their bytes."""

    open: int = 0
    files: int = 0
    bytes: int = 0

    def __add__(self, other: StorageUsage) -> StorageUsage:
        return StorageUsage(*map(sum, zip(astuple(self), astuple(other), strict=True)))


# StorageUsage's fields: what they count, the error's status and code, and what the client can do.
_LIMITS = {
    "open": ("batches that have not ended", 429, "too_many_batches", "wait until one ends, or cancel one"),
    "files": ("files", 429, "too_many_files", "delete some"),
    "bytes": ("bytes of files", 413, "storage_full", "delete some files"),
}


def excess(
    settings: HttpSettings, own: StorageUsage, everything: StorageUsage, wanted: StorageUsage
) -> Iterator[ApiError]:
    """Yield an error for each limit, one key's or all keys', that `wanted` would pass."""
    for used, what, suffix in ((own, "Your API key has", "_per_key"), (everything, "All API keys have", "")):
        for name, (noun, status, code, remedy) in _LIMITS.items():
            limit, count, more = f"batch_max_{name}{suffix}", getattr(used, name), getattr(wanted, name)
            if more and count + more > (most := getattr(settings, limit)):
                text = f"{what} {count} {noun}, and {more} more would pass the limit of {most} ({limit})"
                yield ApiError(status, f"{text}; {remedy}.", code=code)
