"""The step channel between real processes: order, size, faults, and deaths that are noticed at once."""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

from actors.channel import RunnerFault, RunnersLost, SocketExecutor, serve_steps
from runtime.core.plan import NewSlot, StepPlan, StepResult
from runtime.core.types import SamplingParams

SPAWN = multiprocessing.get_context("spawn")  # a forked child would hold the parent's sockets open


class EchoRunner:
    """Answers each step with its id and the sum of its new prompts; counts 7 and 13 are its bad days."""

    def execute(self, plan: StepPlan) -> StepResult:
        if 7 in plan.counts:
            raise ValueError("seven is too much\nfor me")
        if 13 in plan.counts:
            time.sleep(60)
        total = sum(int(new.token_ids.sum()) for new in plan.new) % (1 << 30)
        return StepResult(plan.step_id, np.array([plan.step_id, total], np.int32))


def run_rank(address):
    logging.disable()
    serve_steps(address, EchoRunner())


class Group:
    """An executor and its ranks."""

    def __init__(self, num_ranks, host):
        self.executor = SocketExecutor(num_ranks)
        self.ranks = [
            SPAWN.Process(target=run_rank, args=(self.executor.address(r, host),), daemon=True)
            for r in range(num_ranks)
        ]
        for rank in self.ranks:
            rank.start()
        self.executor.accept()

    def stop(self):
        self.executor.close()
        for rank in self.ranks:
            rank.join(5)
            assert rank.exitcode is not None, "a rank outlived its engine"


@pytest.fixture(params=["", "127.0.0.1"], ids=["unix", "tcp"])
def group(request):
    groups = []

    def make(num_ranks=1):
        groups.append(Group(num_ranks, request.param))
        return groups[-1]

    yield make
    for g in groups:
        g.stop()


def plan(step_id, count=1, prompt=()):
    new = [NewSlot(0, np.array(prompt, np.int32), len(prompt), 0, SamplingParams())] if len(prompt) else []
    one = np.array([1], np.int32)
    return StepPlan(step_id, new=new, slots=one, starts=one, counts=np.array([count], np.int32), samples=one)


def lost_within_a_second(action):
    start = time.monotonic()
    with pytest.raises(RunnersLost) as lost:
        action()
    assert time.monotonic() - start < 1.0
    return str(lost.value)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_depth_two_keeps_the_order(group, num_ranks):
    executor = group(num_ranks).executor
    executor.submit(plan(1))
    for step in range(2, 50):
        executor.submit(plan(step))
        assert executor.collect().token_ids[0] == step - 1
    assert executor.collect().step_id == 49


@pytest.mark.slow
def test_a_plan_of_16_mb_arrives_whole(group):
    executor = group().executor
    prompt = np.arange(4_000_000, dtype=np.int32)
    for step, length in enumerate((4_000_000, 0, 16_383, 16_384, 16_320), start=1):
        executor.submit(plan(step, prompt=prompt[:length]))
        assert executor.collect().token_ids.tolist() == [step, int(prompt[:length].sum() % (1 << 30))]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_at_once(group, victim):
    g = group(2)
    g.executor.submit(plan(1))
    g.executor.collect()
    g.executor.submit(plan(2, count=13))  # all ranks are busy for a minute
    threading.Timer(0.2, os.kill, (g.ranks[victim].pid, signal.SIGKILL)).start()
    assert f"Rank {victim}" in lost_within_a_second(g.executor.collect)
    g.ranks[1 - victim].kill()


@pytest.mark.slow
def test_closing_wakes_a_blocked_collect(group):
    g = group(2)
    g.executor.submit(plan(1, count=13))
    threading.Timer(0.2, g.executor.close).start()
    assert "closed" in lost_within_a_second(g.executor.collect)
    for rank in g.ranks:
        rank.kill()


@pytest.mark.slow
def test_a_fault_comes_back_as_one_sentence(group):
    executor = group(2).executor
    executor.submit(plan(1, count=7))
    with pytest.raises(RunnerFault, match=r"rank [01] failed: ValueError: seven is too much$"):
        executor.collect()


def serve_in_thread(address, secret=None):
    if secret is not None:
        address = type(address)(address.path, address.host, address.port, address.rank, secret)
    threading.Thread(target=serve_steps, args=(address, EchoRunner()), daemon=True).start()


@pytest.mark.parametrize("host", ["", "127.0.0.1"], ids=["unix", "tcp"])
def test_a_wrong_secret_is_turned_away_and_the_right_one_still_gets_in(host):
    executor = SocketExecutor(1)
    address = executor.address(0, host)
    serve_in_thread(address, b"x" * 32)
    time.sleep(0.1)
    serve_in_thread(address)
    executor.accept()
    executor.submit(plan(1))
    assert executor.collect().step_id == 1
    executor.close()


def test_a_claim_of_a_huge_frame_is_refused():
    executor = SocketExecutor(1)
    address = executor.address(0, "127.0.0.1")
    stranger = socket.create_connection((address.host, address.port))
    stranger.sendall(b"\xff\xff\xff\xff" + address.secret)
    serve_in_thread(address)
    executor.accept()
    with contextlib.suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    executor.close()


def test_a_rank_that_does_not_come_is_named():
    executor = SocketExecutor(2)
    serve_in_thread(executor.address(0))
    with pytest.raises(RunnersLost, match=r"Ranks \[1\]"):
        executor.accept(timeout_s=0.3)
