"""Reads files ahead of their use into the system's page cache, while earlier tensors are unpacked.

Without it, a mapped file is read when its pages are touched, and the disk idles while a CPU packs weights."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

_AHEAD = 1 << 30  # bytes between this module's reads and the tensor that is read
_CHUNK = 8 << 20
_THREADS = 2
_PAGE = 4096


class ByteRange(NamedTuple):
    """The bytes of a tensor."""

    path: Path
    start: int
    stop: int


class ReadAhead:
    """Reads byte ranges in their order, at most 1 GiB ahead of the range that `reached` named last."""

    def __init__(self, ranges: Iterable[ByteRange]) -> None:
        chunks = [
            ByteRange(path, at, min(at + _CHUNK, stop))
            for path, start, stop in ranges
            for at in range(start, stop, _CHUNK)
        ]
        ends = accumulate(chunk.stop - chunk.start for chunk in chunks)
        self._ends = list(zip(chunks, ends, strict=True))  # each chunk with the bytes up to its end
        self._starts = {(chunk.path, chunk.start): end - (chunk.stop - chunk.start) for chunk, end in self._ends}
        self._next, self._used, self._is_closed = iter(self._ends), 0, False
        self._changed = threading.Condition()

    def __enter__(self) -> ReadAhead:
        for _ in range(_THREADS):
            threading.Thread(target=self._work, name="read ahead", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def reached(self, path: Path, start: int) -> None:
        """The range that begins here is read now."""
        used = self._starts.get((path, start), 0)
        if used > self._used:
            with self._changed:
                self._used = used
                self._changed.notify_all()

    def _work(self) -> None:
        """Read one chunk after another. An error is left to the reader of the tensor."""
        with suppress(OSError):
            buffer = bytearray(_CHUNK)
            while (chunk := self._wait()) is not None:
                file = os.open(chunk.path, os.O_RDONLY)
                try:
                    if not _is_cached(file, chunk):
                        os.preadv(file, [memoryview(buffer)[: chunk.stop - chunk.start]], chunk.start)
                finally:
                    os.close(file)

    def _wait(self) -> ByteRange | None:
        """The next chunk, once it is near enough; None after the last one."""
        with self._changed:
            while not self._is_closed:
                if (found := next(self._next, None)) is None:
                    return None
                chunk, end = found
                while not self._is_closed and end > self._used + _AHEAD:
                    self._changed.wait()
                if end > self._used and not self._is_closed:
                    return chunk
        return None


def _is_cached(file: int, chunk: ByteRange) -> bool:
    """True if the first and the last page of a chunk are in memory; False if the system does not report it."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    for at in (chunk.start, max(chunk.start, chunk.stop - _PAGE)):
        try:
            os.preadv(file, [bytearray(1)], at, os.RWF_NOWAIT)
        except OSError as e:
            if e.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
                return False
            raise
    return True
