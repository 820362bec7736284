"""Launcher: calls compiled kernels with tensors, or records the calls on a tape that runs again without Python."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from runtime.kernels.llvm.compiler import host, load, trace
from runtime.kernels.llvm.pool import PARTS_PER_THREAD, Pool, Tape, pool_of

Argument = torch.Tensor | int | float | None

_LEAST_WORK = 1 << 14  # work in a kernel that several threads share
_kernels: dict[tuple[Any, ...], int] = {}


def kernel(function: Callable[..., None], **constants: Any) -> int:
    """The address of a kernel, compiled for these constants."""
    key = function, *constants.items()
    address = _kernels.get(key)
    if address is None:
        address = _kernels[key] = load(trace(function, constants, host()), host())
    return address


class Launcher:
    """The calls of one decoder, and the buffers between them.

    Results that the next call consumes lie in named buffers, so a tape finds them at the same place. A result with a
    name is valid until the next one with this name."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._tape: Tape | None = None

    @property
    def pool(self) -> Pool:
        return pool_of(torch.get_num_threads())

    def parts(self, units: int, work: int) -> int:
        """Parts for a kernel of this many indivisible units. `work` counts multiplications: 16 take about 1 ns."""
        threads = self.pool.num_threads
        if threads == 1 or work < _LEAST_WORK:
            return 1
        return min(units, threads * PARTS_PER_THREAD)

    def launch(self, function: int, arguments: Sequence[Argument], parts: int) -> None:
        """Run a kernel now. While recording, the tape keeps the call and its tensors."""
        words = (ctypes.c_int64 * len(arguments))(*map(_word, arguments))
        if self._tape is not None:
            self._tape.add(function, words, parts)
            self._tape.keep(arguments)
        self.pool.launch(function, words, parts)

    def buffer(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor with this shape in the buffer with this name, which grows as needed. Its content is undefined."""
        size = 1
        for length in shape:
            size *= length
        stored = self._buffers.get(name)
        if stored is None or stored.numel() < size or stored.dtype != dtype:
            stored = self._buffers[name] = torch.empty(size, dtype=dtype)
        return stored[:size].view(shape)

    @contextmanager
    def record(self) -> Iterator[Tape]:
        """Record the launches of the context. The tape is complete only if no other operation computed anything."""
        self._tape = tape = Tape()
        try:
            yield tape
        finally:
            self._tape = None

    def replay(self, tape: Tape) -> None:
        self.pool.run(tape)


def _word(argument: Argument) -> int:
    """An argument as a 64-bit word."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        word: int = struct.unpack("<I", struct.pack("<f", argument))[0]
        return word
    return argument or 0
