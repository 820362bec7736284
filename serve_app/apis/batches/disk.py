"""Files in a folder that several fronts share: replaced whole, and locked."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that replaces `path` when the block ends. After an exception nothing of it stays on the disk.

    A path has one writer at a time, so a part that a killed process left is overwritten by the next one."""
    part = part_of(path)
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def part_of(path: Path) -> Path:
    """The file that `replacing` writes before it is whole."""
    return path.with_name(f"{path.name}.part")


@contextmanager
def holding(path: Path) -> Iterator[None]:
    """Wait for the lock of a file, and hold it within the block. The system releases it with its process."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def try_lock(file: IO[bytes]) -> bool:
    """Take the lock of an open file until it is closed, unless another holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
