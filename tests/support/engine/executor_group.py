"""Runners of scripted steps behind a SocketExecutor: in threads, or in processes of their own."""

import contextlib
import multiprocessing
import threading
import zlib
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import pytest

from actors.runners.step_channel import SocketExecutor, serve_steps
from actors.wire.transport import Address, connect
from runtime.base.images import DIGEST_BYTES, Image
from runtime.base.types import SamplingParams
from runtime.core.plan import Encoding, NewSlot, StepPlan, StepResult, encode_plan, encode_result

HOSTS = pytest.mark.parametrize("host", ["", "127.0.0.1"], ids=["unix", "tcp"])
PARAMS = SamplingParams(max_tokens=1)


def image_of(number: int, num_bytes: int) -> Image:
    return Image(bytes([number]) * DIGEST_BYTES, ((1, num_bytes // 3),), bytes([number]) * num_bytes)


def plan_of(step_id: int, num_rows: int = 1, num_ids: int = 0, images: Sequence[Image] = ()) -> StepPlan:
    rows = np.arange(num_rows, dtype=np.int32)
    new = [NewSlot(3, np.arange(num_ids, dtype=np.int32), num_ids, 7, PARAMS)] if num_ids else []
    encodings = [Encoding(image, i, 1) for i, image in enumerate(images)]
    columns = {"slots": rows, "num_computed": rows, "num_tokens": rows + 1, "num_samples": rows}
    return StepPlan(step_id, new=new, encodings=encodings, **columns)


def failing(step_id: int, rank: int) -> StepPlan:
    """In this step `rank` fails (-1 for none), and the others wait for it forever, as in a collective."""
    return msgspec.structs.replace(plan_of(step_id), freed=np.array([rank], np.int32))


class Runner:
    """Answers with a checksum of the plan that arrived, in an array of `num_out` ids."""

    asynchronous = True

    def __init__(self, rank: int = 0, num_out: int = 1) -> None:
        self.rank, self.num_out, self.executed, self.launched = rank, num_out, [], []
        self.may_launch, self.go, self.released = threading.Event(), threading.Event(), threading.Event()
        self.may_launch.set()
        self.go.set()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Record the plan: the work happens at the wait, as on a CPU."""
        self.may_launch.wait()
        self.launched.append((plan.step_id, threading.current_thread()))
        if plan.step_id < 0:
            raise ValueError(f"step {plan.step_id} cannot be launched")
        return partial(self.execute, plan)

    def execute(self, plan: StepPlan) -> StepResult:
        self.go.wait()
        self.executed.append(plan.step_id)
        if self.rank in plan.freed:
            raise ValueError(f"step {plan.step_id} is bad\nsecond line")
        if len(plan.freed):
            self.released.wait()
        return expected(plan, self.num_out)


def serve_rank(address: Address, rank: int) -> None:
    """The body of a runner process."""
    serve_steps(connect(address), Runner(rank), rank)


def expected(plan: StepPlan, num_out: int = 1) -> StepResult:
    return StepResult(plan.step_id, np.full(num_out, zlib.crc32(encode_plan(plan)) >> 1, np.int32))


def same(a: StepResult, b: StepResult) -> bool:
    return encode_result(a) == encode_result(b)


class Group:
    """A socket executor with threads of this process as ranks."""

    def __init__(self, num_ranks: int = 1, host: str = "", num_out: int = 1, asynchronous: bool = True) -> None:
        self.executor = SocketExecutor(num_ranks)
        self.runners = [Runner(rank, num_out) for rank in range(num_ranks)]
        for runner in self.runners:
            runner.asynchronous = asynchronous
        self.threads = [
            threading.Thread(
                target=serve_steps, args=(connect(self.executor.address(rank, host)), runner, rank), daemon=True
            )
            for rank, runner in enumerate(self.runners)
        ]
        for thread in self.threads:
            thread.start()
        self.executor.accept(10)

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_) -> None:
        self.executor.close()
        for runner, thread in zip(self.runners, self.threads, strict=True):
            runner.may_launch.set()
            runner.go.set()
            runner.released.set()
            thread.join(60)
            assert not thread.is_alive(), "a runner ends with its engine"


@contextlib.contextmanager
def processes(num_ranks: int, host: str = ""):
    """A socket executor and the processes of its ranks."""
    spawn = multiprocessing.get_context("spawn")
    executor = SocketExecutor(num_ranks)
    ranks = [
        spawn.Process(target=serve_rank, args=(executor.address(rank, host), rank), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    try:
        executor.accept(60)
        yield executor, ranks
    finally:
        executor.close()
        for process in ranks:
            process.kill()
            process.join()
