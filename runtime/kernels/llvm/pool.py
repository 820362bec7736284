"""Pool: this process's threads that compute kernels, and kernel tapes that are run again and again."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from functools import cache
from typing import Any

import numpy as np

from runtime.kernels.llvm import threads
from runtime.kernels.llvm.compiler import Function, host, load, trace
from runtime.kernels.llvm.language import Int
from runtime.kernels.llvm.threads import LINE, OP_WORDS

PARTS_PER_THREAD = 4  # parts are taken as threads become free
_MAX_RUN = (1 << 31) - 2


class Tape:
    """Kernels with their arguments, in order. Each one begins when the one before it has ended."""

    def __init__(self) -> None:
        self._ops: list[tuple[int, int, int]] = []
        self._kept: list[object] = []  # memory that the arguments point to
        self._words: Any = None
        self.is_shared = False  # a kernel has several parts

    def add(self, function: int, arguments: Any, parts: int) -> None:
        self._ops.append((function, ctypes.addressof(arguments), parts))
        self.is_shared |= parts > 1
        self._kept.append(arguments)

    def keep(self, owner: object) -> None:
        """Keep an object alive until the tape is gone."""
        self._kept.append(owner)

    def __len__(self) -> int:
        return len(self._ops)

    @property
    def words(self) -> Any:
        if self._words is None:
            self._words = aligned_words(len(self._ops) * OP_WORDS)
            for index, op in enumerate(self._ops):
                self._words[index * OP_WORDS : index * OP_WORDS + 3] = op
                self._words[index * OP_WORDS + threads.FOLLOWING] = len(self._ops) - 1 - index
        return self._words


def aligned_words(count: int) -> Any:
    """Zeros, int64 [count], that begin at a cache line."""
    whole = np.zeros(count + LINE, np.int64)
    start = -whole.ctypes.data // 8 % LINE
    return whole[start : start + count]


class Pool:
    """Threads that share the parts of kernels. The caller is one of them.

    Callers in several threads take turns."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        target = host()
        self._run = Function(load(trace(threads.run_tape, {}, target), target))
        self._serve = Function(load(trace(threads.serve, {}, target), target))
        self._control = aligned_words(5 * LINE)
        self._generation, self._single, self._lock = 0, Tape(), threading.Lock()
        self._recent: deque[Any] = deque(maxlen=64)  # tape words that late threads may still read
        self._single.add(0, (ctypes.c_int64 * 1)(), 1)
        self._arguments = (ctypes.c_int64 * 5)()
        self._arguments_at = ctypes.addressof(self._arguments)
        self._serve_words = (ctypes.c_int64 * 1)(self._control.ctypes.data)
        for index in range(1, num_threads):
            threading.Thread(target=self._work, args=(index,), name=f"kernels-{index}", daemon=True).start()

    def _work(self, index: int) -> None:
        """A thread of the pool. It keeps the pool's memory until it has ended."""
        self._serve(ctypes.addressof(self._serve_words), index, self.num_threads)

    def run(self, tape: Tape) -> None:
        """Run all kernels of a tape."""
        with self._lock:
            if not self._recent or self._recent[-1] is not tape.words:
                self._recent.append(tape.words)
            self._start(tape.words, len(tape), tape.is_shared)

    def launch(self, function: int, arguments: Any, parts: int) -> None:
        """Run one kernel in parts."""
        with self._lock:
            words = self._single.words
            words[:3] = function, ctypes.addressof(arguments), parts
            self._start(words, 1, parts > 1)

    def _start(self, words: Any, num_ops: int, wakes: bool) -> None:
        self._generation = self._generation % _MAX_RUN + 1
        self._arguments[:] = [self._control.ctypes.data, words.ctypes.data, num_ops, self._generation, int(wakes)]
        self._run(self._arguments_at, 0, 1)

    def close(self) -> None:
        """End the threads. The pool still computes, in the caller's thread."""
        self._control[threads.STOP * LINE] = 1
        self.launch(kernel_without_work(), self._arguments, self.num_threads)


def nothing(part: Int, parts: Int) -> None:
    """A kernel without work."""


@cache
def kernel_without_work() -> int:
    return load(trace(nothing, {}, host()), host())


@cache
def _pool(num_threads: int, process: int) -> Pool:
    return Pool(num_threads)


def pool_of(num_threads: int) -> Pool:
    """The pool of this process with this many threads. A forked process makes its own."""
    return _pool(num_threads, os.getpid())
