"""Files mapped into memory, without torch."""

from __future__ import annotations

import mmap
from pathlib import Path

from runtime.core.types import CallboardError


class MappedFile:
    """A file's bytes. Raises CallboardError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None
        except OSError as e:
            raise CallboardError(f"{path} cannot be read: {e.strerror}.") from e
        self.data = memoryview(self._map or b"")

    def forget(self, start: int, size: int) -> None:
        """Drops the pages of `size` bytes from `start` on from this process' memory; a later access reads them again.

        Without this, a model's files would count as memory of the process as long as it lives."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if self._map and size:
            self._map.madvise(mmap.MADV_DONTNEED, first, start + size - first)
