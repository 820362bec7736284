"""The step channel's round trip, and a step's cost for the engine's thread.

    python -m benchmarks.serving.step_channel [--steps 2000] [--ranks 1] [--device-us 0]

A step of batch B is B decode rows: one token a row, sampled, and a table write for every 16th row. The runner answers
at once, so a round trip is encode, send, wake the runner, decode, encode, send, wake the engine, decode. Engine CPU is
its thread's time alone; "engine core" adds the scheduler: schedule, submit, collect, commit for a whole batch. With
--device-us the runner has a device that computes one step after another, each in that time. If a step takes longer,
the device lacked a plan. At depth 2 a new step is submitted before the oldest is collected. The time
between results is then more relevant than a round trip, and both are shown. The runner is another process, except for
"in process".
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from actors.runners.step_channel import SocketExecutor, serve_steps
from actors.wire.transport import Address, connect
from runtime.assembly.engine import build_engine
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import Executor, InProcess
from runtime.core.plan import StepPlan, StepResult

BATCHES = (1, 64, 256)
BLOCK_SIZE = 16
PROMPT_LEN = 32
WARM_UP = 100  # steps


class EchoRunner:
    """Samples token 1 for every row that samples; its device takes `device_s` for a step."""

    def __init__(self, device_s: float = 0.0) -> None:
        self._device_s, self.asynchronous = device_s, device_s > 0
        self._idle_from = 0.0  # when the device will have done all that was launched

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        done = self._idle_from = max(self._idle_from, time.monotonic()) + self._device_s

        def wait() -> StepResult:
            if self._device_s and (rest := done - time.monotonic()) > 0:
                time.sleep(rest)
            return StepResult(plan.step_id, np.ones(int(plan.num_samples.sum()), np.int32))

        return wait


def serve(address: Address, rank: int, device_s: float) -> None:
    serve_steps(connect(address), EchoRunner(device_s), rank)


@contextlib.contextmanager
def in_process(device_s: float) -> Iterator[Executor]:
    yield InProcess(EchoRunner(device_s))


@contextlib.contextmanager
def sockets(num_ranks: int, host: str, device_s: float) -> Iterator[Executor]:
    spawn = multiprocessing.get_context("spawn")
    executor = SocketExecutor(num_ranks)
    ranks = [spawn.Process(target=serve, args=(executor.address(r, host), r, device_s)) for r in range(num_ranks)]
    for process in ranks:
        process.start()
    try:
        executor.accept()
        yield executor
    finally:
        executor.close()  # the ranks end with it
        for process in ranks:
            process.join()


def decode_step(step_id: int, batch: int) -> StepPlan:
    """The scheduler's plan for `batch` requests that decode."""
    rows = np.arange(batch, dtype=np.int32)
    ones = np.ones(batch, np.int32)
    full = rows[step_id % BLOCK_SIZE :: BLOCK_SIZE]
    tables = np.stack((full, full + 1, full + 7))
    return StepPlan(
        step_id, block_table_writes=tables, slots=rows, num_computed=rows, num_tokens=ones, num_samples=ones
    )


def bare(executor: Executor, batch: int, depth: int, num_steps: int) -> tuple[np.ndarray, float, float]:
    """Round trips in us, us between results, and the engine thread's CPU in us a step."""
    plans = [decode_step(i, batch) for i in range(64)]
    sent: list[float] = []
    trips: list[float] = []
    for i in range(WARM_UP + num_steps + depth - 1):
        if i == WARM_UP:
            start, cpu = time.perf_counter(), time.thread_time()
        if i < WARM_UP + num_steps:
            sent.append(time.perf_counter())
            executor.submit(plans[i % 64])
        if i >= depth - 1:
            executor.collect()
            trips.append(time.perf_counter() - sent[i - depth + 1])
    us = 1e6 / num_steps
    return np.array(trips[WARM_UP:]) * 1e6, (time.perf_counter() - start) * us, (time.thread_time() - cpu) * us


def whole(executor: Executor, batch: int, depth: int, num_steps: int) -> tuple[float, float]:
    """us between steps of the engine core, and its thread's CPU in us a step, while `batch` requests decode."""
    max_len = PROMPT_LEN + WARM_UP + num_steps + 2 * BLOCK_SIZE
    num_blocks = 1 + batch * (max_len // BLOCK_SIZE + 1)
    config = EngineConfig(
        max_num_seqs=batch, max_num_batched_tokens=batch * PROMPT_LEN, block_size=BLOCK_SIZE, pipeline_depth=depth
    )
    info = ModelInfo("echo", 32000, max_len, (0,), num_blocks, BLOCK_SIZE, "none", "none")
    core = build_engine(config, info, executor)
    params = SamplingParams(max_tokens=WARM_UP + num_steps, temperature=0.0)
    rng = np.random.default_rng(0)
    for i in range(batch):
        core.add(Request(str(i), rng.integers(1, 32000, PROMPT_LEN).tolist(), PROMPT_LEN, params))
    for _ in range(WARM_UP):
        core.step()
    start, cpu = time.perf_counter(), time.thread_time()
    for _ in range(num_steps - 2 * depth):
        core.step()
    us = 1e6 / (num_steps - 2 * depth)
    figures = (time.perf_counter() - start) * us, (time.thread_time() - cpu) * us
    while core.has_work:
        core.step()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="measured steps of each case")
    parser.add_argument("--ranks", type=int, default=1, help="runner processes (tensor-parallel ranks)")
    parser.add_argument("--device-us", type=float, default=0, help="time of a step on the runner's device")
    args = parser.parse_args()
    device_s = args.device_us / 1e6
    kinds: dict[str, Callable[[], contextlib.AbstractContextManager[Executor]]] = {
        "in process": lambda: in_process(device_s),
        "unix": lambda: sockets(args.ranks, "", device_s),
        "tcp": lambda: sockets(args.ranks, "127.0.0.1", device_s),
    }
    sys.setswitchinterval(0.0005)  # the engine does so
    print(f"{args.ranks} rank(s), {args.steps} steps a case, us")
    print("                          channel alone                       engine core")
    print("kind        batch depth   trip p50   trip p99   step   cpu     step   cpu")
    for kind, make in kinds.items():
        with make() as executor:
            for batch in BATCHES:
                for depth in (1, 2):
                    trips, step, cpu = bare(executor, batch, depth, args.steps)
                    core_step, core_cpu = whole(executor, batch, depth, args.steps)
                    p50, p99 = np.percentile(trips, (50, 99))
                    print(
                        f"{kind:<11} {batch:>5} {depth:>5}   {p50:>8.1f}   {p99:>8.1f} {step:>6.0f} {cpu:>5.0f}"
                        f"   {core_step:>6.0f} {core_cpu:>5.0f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
