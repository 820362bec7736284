"""What a step costs beside the model: round trip of the step channel, and the engine's CPU time per step.

    python benchmarks/step_channel.py [--ray]

A runner process answers at once with one token a row. "channel" is submit + collect of a decode plan (encode, send,
receive, decode); "engine" is EngineCore.step around it: plan, channel, commit. CPU is the engine thread's own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from actors.channel import Address, RayRpc, SocketExecutor, serve_steps
from runtime.core.config import EngineConfig, ModelInfo
from runtime.core.engine import EngineCore
from runtime.core.executor import Executor, InProcess
from runtime.core.plan import StepPlan, StepResult, decode_plan, encode_result
from runtime.core.types import Request, SamplingParams


class InstantRunner:
    """Token 7 for every sampling row."""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step_id, np.full(int(plan.samples.sum()), 7, np.int32))


class InstantActor:
    """The same behind Ray calls."""

    def execute(self, frame: bytes) -> bytes:
        return encode_result(InstantRunner().execute(decode_plan(frame)))


def serve(address: Address) -> None:
    serve_steps(address, InstantRunner())


def socket_executor(num_ranks: int, host: str) -> Executor:
    executor = SocketExecutor(num_ranks)
    spawn = multiprocessing.get_context("spawn")
    for rank in range(num_ranks):
        spawn.Process(target=serve, args=(executor.address(rank, host),), daemon=True).start()
    executor.accept()
    return executor


def ray_executor() -> Executor:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    actor: Any = ray.remote(InstantActor)
    return RayRpc([actor.remote()])


def decode_step(step_id: int, batch: int) -> StepPlan:
    rows = np.arange(batch, dtype=np.int32)
    ones = np.ones(batch, np.int32)
    return StepPlan(step_id, slots=rows, starts=rows + 100, counts=ones, samples=ones)


def measure(step: Callable[[int], None], steps: int) -> tuple[float, float, float]:
    """p50 and p99 of a call in us, and this thread's CPU time per call in us."""
    for i in range(20):
        step(i)
    times = []
    cpu = time.thread_time()
    for i in range(20, 20 + steps):
        start = time.perf_counter()
        step(i)
        times.append(time.perf_counter() - start)
    cpu = time.thread_time() - cpu
    p50, p99 = np.percentile(times, [50, 99])
    return p50 * 1e6, p99 * 1e6, cpu / steps * 1e6


def channel(executor: Executor, batch: int, depth: int, steps: int) -> tuple[float, float, float]:
    for i in range(depth - 1):
        executor.submit(decode_step(i, batch))

    def step(i: int) -> None:
        executor.submit(decode_step(i, batch))
        executor.collect()

    figures = measure(step, steps)
    for _ in range(depth - 1):
        executor.collect()
    return figures


def engine(executor: Executor, batch: int, depth: int, steps: int) -> tuple[float, float, float]:
    config = EngineConfig(max_num_seqs=batch, max_num_batched_tokens=8192, pipeline_depth=2 if depth == 2 else 1)
    info = ModelInfo("toy", "toy", 50_000, 8192, (0,), batch * 600, 16, "none", "none")
    core = EngineCore(config, info, executor)
    for i in range(batch):
        core.add(Request(str(i), [100 + i] * 20, 20, SamplingParams(max_tokens=8000)))
    figures = measure(lambda _: core.step() and None, steps)
    for i in range(batch):
        core.abort(str(i))
    while core.has_work:
        core.step()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ray", action="store_true", help="also measure Ray actor calls")
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    executors: dict[str, Executor] = {
        "in process": InProcess(InstantRunner()),
        "Unix socket": socket_executor(1, ""),
        "Unix socket, 2 ranks": socket_executor(2, ""),
        "TCP": socket_executor(1, "127.0.0.1"),
    }
    if args.ray:
        executors["Ray calls"] = ray_executor()
    print("| executor | depth | batch | channel p50 / p99 us | channel CPU us | engine p50 / p99 us | engine CPU us |")
    print("|---|---|---|---|---|---|---|")
    for name, executor in executors.items():
        steps = args.steps // 10 if name == "Ray calls" else args.steps
        for depth in (1, 2):
            for batch in (1, 64, 256):
                a, b, c = channel(executor, batch, depth, steps)
                d, e, f = engine(executor, batch, depth, steps)
                print(f"| {name} | {depth} | {batch} | {a:.0f} / {b:.0f} | {c:.0f} | {d:.0f} / {e:.0f} | {f:.0f} |")
        executor.close()


if __name__ == "__main__":
    main()
