"""Acknowledgements of loads between ranks: a load is complete if all ranks have loaded their part."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

_ENTRIES = 1 << 16  # loads that may be in flight


class Acks:
    """A small file that the ranks of a group share. Each rank writes only its own row."""

    def __init__(self, folder: Path, rank: int, handles: Sequence[bytes], barrier: Callable[[], None]) -> None:
        """The file's name follows from the ranks' handles. The name is removed when all ranks have opened it."""
        path, shape = folder / f"acks-{hashlib.sha256(b''.join(handles)).hexdigest()[:16]}", (len(handles), _ENTRIES)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(file, 0, 8 * len(handles) * _ENTRIES)
            with open(file, "r+b", closefd=False) as opened:
                self._rows = np.memmap(opened, np.int64, "r+", shape=shape).view(np.ndarray)
        finally:
            os.close(file)
        self._own = self._rows[rank]
        self.clear()
        barrier()
        if rank == 0:
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Forget this rank's acknowledgements."""
        self._own[:] = 0

    def write(self, number: int, is_loaded: bool) -> None:
        """This rank has ended the load with a number."""
        self._own[number % _ENTRIES] = 2 * number + 1 + is_loaded

    def outcome(self, number: int) -> bool | None:
        """True if all ranks have loaded their part; None while a rank has not ended."""
        found = self._rows[:, number % _ENTRIES] - (2 * number + 1)
        return None if ((found != 0) & (found != 1)).any() else bool(found.all())
