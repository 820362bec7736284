"""The threads of compiled kernels: each part is computed once, in order, with any number of threads."""

import ctypes
import itertools
import os
import threading
import time
from functools import cache

import numpy as np
import pytest
import torch

from runtime.kernels.llvm.compiler import host, load, trace
from runtime.kernels.llvm.language import I64s, Int, loop, variable
from runtime.kernels.llvm.launcher import Launcher, kernel
from runtime.kernels.llvm.pool import Pool, Tape


def add_after(source: I64s, out: I64s, size: Int, part: Int, parts: Int) -> None:
    """out[part] += 1 + the sum of source: wrong if a kernel begins before the last one has ended."""
    total = variable(out.load(part) + 1)
    for i in loop(0, size):
        total += source.load(i)
    out.store(part, total.now)


@cache
def address() -> int:
    return load(trace(add_after, {}, host()), host())


def chain(length: int, parts: int) -> tuple[Tape, list[np.ndarray]]:
    """A tape in which each kernel sums the results of the one before it."""
    tape, arrays = Tape(), [np.zeros(parts, np.int64) for _ in range(length + 1)]
    for source, out in itertools.pairwise(arrays):
        tape.add(address(), (ctypes.c_int64 * 3)(source.ctypes.data, out.ctypes.data, parts), parts)
    return tape, arrays


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("parts", [1, 2, 5, 16])
def test_a_kernel_begins_when_the_last_has_ended(num_threads, parts):
    pool = Pool(num_threads)
    for _ in range(50):
        tape, arrays = chain(6, parts)
        pool.run(tape)
        want = 0
        for out in arrays[1:]:
            want = want * parts + 1
            assert out.tolist() == [want] * parts
    pool.close()


def test_a_tape_runs_again_and_again():
    pool, (tape, arrays) = Pool(3), chain(1, 7)
    for run in range(1, 2001):
        pool.run(tape)
        assert arrays[1].tolist() == [run] * 7
    pool.close()


def test_sleeping_threads_do_not_matter():
    pool = Pool(4)
    for _ in range(5):
        time.sleep(0.05)  # longer than idle threads spin
        tape, arrays = chain(3, 8)
        pool.run(tape)
        assert arrays[3].tolist() == [73] * 8
    pool.close()


def test_callers_in_several_threads_take_turns():
    pool, failures = Pool(2), []

    def work() -> None:
        for _ in range(200):
            tape, arrays = chain(2, 4)
            pool.run(tape)
            if arrays[2].tolist() != [5] * 4:
                failures.append(arrays[2])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    pool.close()


def test_a_closed_pool_still_computes():
    pool = Pool(3)
    pool.close()
    tape, arrays = chain(2, 4)
    pool.run(tape)
    assert arrays[2].tolist() == [5] * 4


def test_a_forked_process_computes_alone():
    launcher, source, out = Launcher(), torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    launcher.launch(kernel(add_after), (source, out, 4), 4)
    if (child := os.fork()) == 0:
        launcher.launch(kernel(add_after), (source, out, 4), 4)
        os._exit(0 if out.tolist() == [2] * 4 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert out.tolist() == [1] * 4


def test_a_recorded_call_runs_again_with_new_content():
    launcher, source, out = Launcher(), torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    with launcher.record() as tape:
        launcher.launch(kernel(add_after), (source, out, 4), 4)
    source.fill_(10)
    launcher.replay(tape)
    assert out.tolist() == [42] * 4
    assert len(tape) == 1


def count_parts(counts: I64s, part: Int, parts: Int) -> None:
    counts.store(part, counts.load(part) + 1)


@pytest.mark.parametrize("num_threads", [2, 8])
def test_late_threads_take_no_part_of_the_next_kernel(num_threads):
    """A kernel of one part ends while other threads still arrive. The next kernel has many parts."""
    pool, function = Pool(num_threads), load(trace(count_parts, {}, host()), host())
    counts = [np.zeros(8, np.int64), np.zeros(8, np.int64)]
    words = [(ctypes.c_int64 * 1)(array.ctypes.data) for array in counts]
    for launch in range(1, 20_001):
        pool.launch(function, words[0], 1)
        pool.launch(function, words[1], 8)
        assert counts[0][0] == launch
        assert (counts[1] == launch).all()
    pool.close()
