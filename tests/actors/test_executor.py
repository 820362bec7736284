"""The step channel over real sockets: order, large plans, faults, deaths."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from actors.runners.step_channel import RunnersLost, SocketExecutor
from actors.wire import transport
from runtime.base.images import Image
from runtime.core.executor import InProcess
from runtime.core.plan import StepResult
from runtime.features import keyed_store
from tests.support.cpu_time import reference_s
from tests.support.engine.executor_group import (
    HOSTS,
    Group,
    Runner,
    expected,
    failing,
    image_of,
    plan_of,
    same,
)


def test_in_process_executes_in_order():
    runner = Runner()
    executor = InProcess(runner)
    executor.submit(plan_of(1))
    executor.submit(plan_of(2))
    assert runner.executed == []
    assert [executor.collect().step_id, executor.collect().step_id] == [1, 2]


@HOSTS
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_depth_2_keeps_the_order(host, num_ranks):
    with Group(num_ranks, host) as group:
        executor = group.executor
        executor.submit(plan_of(0))
        for step in range(1, 50):
            executor.submit(plan_of(step, num_rows=step))
            assert same(executor.collect(), expected(plan_of(step - 1, num_rows=max(1, step - 1))))
        executor.collect()
        for runner in group.runners:  # results of ranks other than 0 were not awaited
            wait_until(lambda runner=runner: len(runner.executed) == 50)
            assert runner.executed == list(range(50))


@HOSTS
def test_a_plan_of_four_million_ids_is_executed(host):
    plan = plan_of(5, num_ids=4_000_000)
    with Group(2, host) as group:
        group.executor.submit(plan)
        assert same(group.executor.collect(), expected(plan))


@HOSTS
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_images_reach_every_rank_before_their_plan(monkeypatch, host, num_ranks):
    """The last plan names an image that has left the store, and one that is there."""
    monkeypatch.setitem(keyed_store._LIMITS, Image, 15 << 20)
    images = [image_of(i, 3 << 20) for i in range(8)]
    plans = [plan_of(0, images=images[:3]), plan_of(1, images=images[3:]), plan_of(2, images=[images[0], images[-1]])]
    with Group(num_ranks, host) as group:
        for plan in plans:
            group.executor.submit(plan)
            assert same(group.executor.collect(), expected(plan))
        for runner in group.runners:
            wait_until(lambda runner=runner: runner.executed == [0, 1, 2])


def test_an_image_costs_the_step_thread_a_few_copies():
    """The step thread hands pixels over: it copies them once, and the kernel does."""
    image, times = image_of(0, 12 << 20), []
    with Group(1) as group:
        for number in range(8):
            image = Image(number.to_bytes(16), image.sizes, image.pixels)
            begin = time.thread_time()
            bytearray(image.pixels)
            copied = time.thread_time()
            group.executor.submit(plan_of(number, images=[image]))
            times.append((copied - begin, time.thread_time() - copied))
            group.executor.collect()
    copy, submit = (min(each) for each in zip(*times, strict=True))
    assert submit < 10 * copy


@HOSTS
def test_large_results_and_large_plans_do_not_block_each_other(host):
    """Rank 0 cannot write its result until the engine reads, the engine cannot write its plan until rank 0 reads."""
    plans = [plan_of(i, num_ids=6_000_000) for i in range(4)]
    with Group(1, host, num_out=6_000_000) as group, ThreadPoolExecutor(1) as pool:

        def pipelined() -> list[StepResult]:
            executor = group.executor
            results = []
            for i, plan in enumerate(plans):
                executor.submit(plan)
                if i:
                    results.append(executor.collect())
            return [*results, executor.collect()]

        future = pool.submit(pipelined)
        try:
            results = future.result(60)
        finally:
            group.executor.close()
    assert all(same(r, expected(p, 6_000_000)) for r, p in zip(results, plans, strict=True))


def test_submit_returns_while_the_runner_computes():
    with Group() as group:
        group.runners[0].go.clear()
        for step in range(2):
            group.executor.submit(plan_of(step, num_rows=256, num_ids=8192))
        group.runners[0].go.set()
        assert [group.executor.collect().step_id for _ in range(2)] == [0, 1]


# ---- launched before the last result ------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.001)


@HOSTS
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_plans_are_launched_while_earlier_results_are_awaited(host, num_ranks):
    with Group(num_ranks, host) as group:
        for runner in group.runners:
            runner.go.clear()
        for step in range(3):
            group.executor.submit(plan_of(step))
        for runner in group.runners:
            wait_until(lambda runner=runner: [i for i, _ in runner.launched] == [0, 1, 2])
            assert runner.executed == []
            runner.go.set()
        assert [group.executor.collect().step_id for _ in range(3)] == [0, 1, 2]


def test_one_thread_launches_and_one_other_computes():
    with Group() as group:
        computing = set()
        execute = group.runners[0].execute
        group.runners[0].execute = lambda plan: (computing.add(threading.current_thread()), execute(plan))[1]
        for step in range(20):
            group.executor.submit(plan_of(step))
            group.executor.collect()
        launching = {thread for _, thread in group.runners[0].launched}
        assert launching == {group.threads[0]}
        assert len(computing) == 1
        assert computing.isdisjoint(launching)


@HOSTS
def test_without_a_device_one_thread_does_all_work(host):
    with Group(2, host, asynchronous=False) as group:
        computing = set()
        execute = group.runners[0].execute
        group.runners[0].execute = lambda plan: (computing.add(threading.current_thread()), execute(plan))[1]
        group.executor.submit(plan_of(0))
        for step in range(1, 20):
            group.executor.submit(plan_of(step))
            assert same(group.executor.collect(), expected(plan_of(step - 1)))
        assert same(group.executor.collect(), expected(plan_of(19)))
        assert computing == {group.threads[0]}
        group.executor.submit(failing(20, 1))
        group.executor.submit(plan_of(21))
        with pytest.raises(RunnersLost, match="rank 1 failed: ValueError: step 20 is bad"):
            group.executor.collect()


@HOSTS
def test_a_failed_launch_is_reported_after_earlier_results(host):
    with Group(1, host) as group:
        runner = group.runners[0]
        runner.go.clear()
        for step in (0, -7, 2):
            group.executor.submit(plan_of(step))
        wait_until(lambda: len(runner.launched) == 2)
        runner.go.set()
        assert group.executor.collect().step_id == 0
        with pytest.raises(RunnersLost, match=r"rank 0 failed: ValueError: step -7 cannot be launched\.$"):
            group.executor.collect()
        assert [step for step, _ in runner.launched] == [0, -7], "nothing is launched after a fault"


def test_a_runner_stuck_in_a_step_ends_with_its_engine():
    with Group() as group:
        group.runners[0].go.clear()
        group.executor.submit(plan_of(0))
        wait_until(lambda: len(group.runners[0].launched) == 1)
        group.executor.close()
        group.threads[0].join(60)
        assert not group.threads[0].is_alive()


# ---- faults and ends ----------------------------------------------------------------------------------------------


@HOSTS
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failing_step_is_one_sentence_that_names_the_rank(host, rank, caplog):
    for _ in range(10):
        with Group(2, host) as group:
            group.runners[rank].go.clear()
            group.executor.submit(failing(0, rank))
            group.executor.submit(plan_of(1))  # unread when the runner fails: that must not reset its socket
            group.runners[rank].go.set()
            with pytest.raises(RunnersLost) as error:
                group.executor.collect()
            assert error.value.rank == rank
            assert str(error.value) == f"The runner of rank {rank} failed: ValueError: step 0 is bad."
    assert "Traceback" in caplog.text  # here the runner's log is ours


@HOSTS
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("blocked_in", ["collect", "submit", "accept"])
def test_close_wakes_blocked_threads(host, num_ranks, blocked_in):
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        if blocked_in == "accept":
            executor = SocketExecutor(num_ranks)
            executor.address(0, host)
            blocked = pool.submit(executor.accept, 30)
        else:
            group = stack.enter_context(Group(num_ranks, host))
            executor = group.executor
            for runner in group.runners:
                runner.may_launch.clear()
            executor.submit(plan_of(0))
            if blocked_in == "collect":
                blocked = pool.submit(executor.collect)
            else:
                blocked = pool.submit(executor.submit, plan_of(1, num_ids=20_000_000))
        time.sleep(0.1)
        assert not blocked.done()
        executor.close()
        executor.close()
        with pytest.raises(RunnersLost, match="closed") as error:
            blocked.result(1)
        assert error.value.rank is None


def test_a_lost_rank_is_noticed_while_another_blocks():
    """Rank 0 waits for rank 1 (a collective), so it never reads the large plan; rank 1 dies."""
    with Group(2) as group, ThreadPoolExecutor(1) as pool:
        group.runners[0].may_launch.clear()
        group.executor.submit(plan_of(0))
        blocked = pool.submit(group.executor.submit, plan_of(1, num_ids=20_000_000))
        time.sleep(0.1)
        assert not blocked.done()
        group.executor._sockets[1].sock.shutdown(socket.SHUT_RD)  # as the end of rank 1's socket shows here
        with pytest.raises(RunnersLost, match="Rank 1 is gone") as error:
            blocked.result(1)
        assert error.value.rank == 1


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_waiting_costs_no_cpu(num_ranks):
    with Group(num_ranks) as group, ThreadPoolExecutor(1) as pool:

        def cpu_of_collect() -> float:
            before = time.thread_time()
            group.executor.collect()
            return time.thread_time() - before

        for runner in group.runners:
            runner.go.clear()
        group.executor.submit(plan_of(0))
        waiting = pool.submit(cpu_of_collect)
        time.sleep(0.5)
        for runner in group.runners:
            runner.go.set()
        assert waiting.result(60) < reference_s()


@HOSTS
def test_a_runner_with_too_large_a_result_is_lost(host, monkeypatch):
    monkeypatch.setattr(transport, "MAX_FRAME", 1 << 20)
    with Group(1, host, num_out=1 << 19) as group:
        group.executor.submit(plan_of(0))
        with pytest.raises(RunnersLost, match="exceeds the limit") as error:
            group.executor.collect()
        assert error.value.rank == 0
