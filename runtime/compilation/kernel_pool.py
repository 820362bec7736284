"""Compiles kernels by processes side by side. Two pools with one cache folder never compile the same kernel at once.

A pool forks its processes, which have torch's and Triton's modules and the compilations from it. A lock is one byte of
a file in the cache folder; the kernel releases it when its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import traceback
from collections.abc import Sequence

from runtime.compilation.triton_cache import Compilation, cache_folder

_LOCKS = "callboard.lock"
_INDEX_BYTES = 4
_NICE = 10  # the process that reads the weights goes first


def compile_all(kernels: Sequence[Compilation], num_workers: int) -> list[str]:
    """Compile the kernels that the cache lacks. Returns the keys that this pool has compiled.

    A kernel is left out if it fails or its process dies. Its launch then compiles it, and reports the error."""
    kernels = sorted(kernels, key=lambda each: -each.size)  # the last ones take the shortest
    jobs, answers = os.pipe(), os.pipe()
    os.write(jobs[1], b"".join(index.to_bytes(_INDEX_BYTES, "little") for index in range(len(kernels))))
    os.close(jobs[1])
    workers = [_fork(kernels, jobs[0], answers) for _ in range(min(num_workers, len(kernels)))]
    os.close(jobs[0])
    os.close(answers[1])
    with os.fdopen(answers[0]) as lines:
        compiled = lines.read().split()  # ends with the last worker
    for worker in workers:
        os.waitpid(worker, 0)
    return compiled


def _fork(kernels: Sequence[Compilation], jobs: int, answers: tuple[int, int]) -> int:
    if (worker := os.fork()) != 0:
        return worker
    try:
        os.nice(_NICE)
        os.close(answers[0])
        _work(kernels, jobs, answers[1])
    finally:
        os._exit(0)  # nothing of the parent's runs


def _work(kernels: Sequence[Compilation], jobs: int, answer: int) -> None:
    """Compile jobs until there are none. Another pool's kernels come last, and are then in the cache."""
    busy: list[Compilation] = []
    cache_folder().mkdir(parents=True, exist_ok=True)
    with open(cache_folder() / _LOCKS, "ab") as locks:
        while index := os.read(jobs, _INDEX_BYTES):
            compilation = kernels[int.from_bytes(index, "little")]
            if not _compile(compilation, locks.fileno(), answer, wait=False):
                busy.append(compilation)
        for compilation in busy:
            _compile(compilation, locks.fileno(), answer, wait=True)


def _compile(compilation: Compilation, locks: int, answer: int, wait: bool) -> bool:
    """Compile one kernel under its lock. Returns false if another process has the lock and `wait` is false."""
    place = int(compilation.key[:15], 16)
    try:
        fcntl.lockf(locks, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, place)
    except BlockingIOError:
        return False
    try:
        was_cached = compilation.is_cached()
        compilation.compile()
        if not was_cached:
            os.write(answer, f"{compilation.key}\n".encode())
    except Exception:  # the launch reports it
        traceback.print_exc()
    finally:
        fcntl.lockf(locks, fcntl.LOCK_UN, 1, place)
    return True
