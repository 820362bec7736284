"""Times of kernels on a GPU as CUDA graphs, the card's ceilings, and compilation ahead without the card."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import torch

from runtime.kernels import triton_language
from runtime.kernels.triton_language import INTERPRETED

HBM_BYTES_S = 4.45e12  # read, measured on an H200
BF16_FLOP_S = 788e12  # GEMM 8192^3, measured there
ROTATION_BYTES = 0 if INTERPRETED else 256 << 20  # several times the L2 cache
DEVICE = "cpu" if INTERPRETED else "cuda"


def graph_us(run: Callable[[], Any], warm_up: float = 0.0, times: int = 7, replays: int = 5) -> float:
    """Return the median microseconds of a replay among several in a row, which hide the host's start of a graph.

    Replays for `warm_up` seconds come first, because an idle card has low clocks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    start = time.perf_counter()
    while time.perf_counter() - start < warm_up:
        graph.replay()
        torch.cuda.synchronize()
    seen = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # the start of the first is not timed
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        seen.append(begin.elapsed_time(end) * 1e3 / replays)
    return statistics.median(seen)


def graph_seconds(launch: Callable[[int], object], launches: int) -> float:
    """Return the seconds of one of `launches` launches that a CUDA graph holds; launch(i) is the i-th."""
    return graph_us(lambda: [launch(i) for i in range(launches)]) * 1e-6 / launches


def compile_ahead(compile_one: Callable[[Any], str], jobs: Iterable[Any]) -> Iterator[str]:
    """Fill the compile cache in processes side by side. Yields the errors that `compile_one` returns.

    Must run before this process uses the GPU: forked children cannot share it."""
    with ProcessPoolExecutor(os.cpu_count(), get_context("fork")) as pool:
        yield from filter(None, pool.map(compile_one, jobs))


@contextmanager
def compile_only() -> Iterator[None]:
    """Launches within compile their kernels for a Hopper card, over tensors without data.

    The process must not launch on a GPU afterwards."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    hopper = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
    )
    driver.set_active(hopper)
    triton_language._has_pdl = lambda device: True
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
    launch = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **options: launch(
        self, *args, grid=grid, warmup=True, **options
    )
    try:
        yield
    finally:
        JITFunction.run = launch
