"""The step channel over real sockets: order, large frames, faults, strangers, deaths, and Ray's actors."""

import contextlib
import multiprocessing
import os
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import transport
from actors.executor import RunnerFault, RunnersLost, SocketExecutor, serve_steps
from actors.transport import Address, connect
from runtime.core.executor import InProcess
from runtime.core.plan import NewSlot, StepPlan, StepResult, encode_plan, encode_result
from runtime.core.types import SamplingParams

HOSTS = pytest.mark.parametrize("host", ["", "127.0.0.1"], ids=["unix", "tcp"])
PARAMS = SamplingParams(max_tokens=1)


def plan_of(step_id: int, num_rows: int = 1, num_ids: int = 0) -> StepPlan:
    rows = np.arange(num_rows, dtype=np.int32)
    new = [NewSlot(3, np.arange(num_ids, dtype=np.int32), num_ids, 7, PARAMS)] if num_ids else []
    return StepPlan(step_id, new=new, slots=rows, num_computed=rows, num_tokens=rows + 1, num_samples=rows)


def failing(step_id: int, rank: int) -> StepPlan:
    """In this step `rank` fails (or none, for -1), and the others wait for it for ever, as in a collective."""
    return replace(plan_of(step_id), freed=np.array([rank], np.int32))


class Runner:
    """Answers with a checksum of the plan that arrived, in an array of `num_out` ids."""

    asynchronous = True

    def __init__(self, rank: int = 0, num_out: int = 1) -> None:
        self.rank, self.num_out, self.executed, self.launched = rank, num_out, [], []
        self.may_launch, self.go, self.released = threading.Event(), threading.Event(), threading.Event()
        self.may_launch.set()
        self.go.set()

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Only notes it: the work is left to the wait, as on a CPU."""
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
    serve_steps(address, Runner(rank), rank)


def expected(plan: StepPlan, num_out: int = 1) -> StepResult:
    return StepResult(plan.step_id, np.full(num_out, zlib.crc32(encode_plan(plan)) >> 1, np.int32))


def same(a: StepResult, b: StepResult) -> bool:
    return encode_result(a) == encode_result(b)


class Group:
    """A socket executor whose ranks are threads of this process."""

    def __init__(self, num_ranks: int = 1, host: str = "", num_out: int = 1, asynchronous: bool = True) -> None:
        self.executor = SocketExecutor(num_ranks)
        self.runners = [Runner(rank, num_out) for rank in range(num_ranks)]
        for runner in self.runners:
            runner.asynchronous = asynchronous
        self.threads = [
            threading.Thread(target=serve_steps, args=(self.executor.address(rank, host), runner, rank), daemon=True)
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
            thread.join(5)
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


# ---- frames -------------------------------------------------------------------------------------------------------


def pair(kind: str) -> tuple[transport.FrameSocket, transport.FrameSocket]:
    if kind == "unix":
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            a = socket.create_connection(listener.getsockname())
            b, _ = listener.accept()
    return transport.frame_socket(a), transport.frame_socket(b)


KINDS = pytest.mark.parametrize("kind", ["unix", "tcp"])
packets = st.builds(lambda n, more: max(1, n * (transport._PACKET - 1) + more), st.integers(0, 3), st.integers(-2, 2))


@KINDS
@given(st.lists(packets | st.integers(1, 200), min_size=1, max_size=6))
def test_frames_of_any_size_keep_their_bounds(kind, sizes):
    a, b = pair(kind)
    frames = [np.random.default_rng(i).bytes(size) for i, size in enumerate(sizes)]
    sender = threading.Thread(target=lambda: ([a.send(f) for f in frames], a.sock.close()))
    sender.start()
    for frame in frames:
        assert b.receive() == frame
    assert b.receive() is None
    sender.join()
    b.sock.close()


@KINDS
def test_a_frame_cut_off_by_a_death_is_the_end(kind):
    a, b = pair(kind)
    if kind == "unix":
        a.sock.send(transport._MORE + bytes(100))
    else:
        a.sock.send(transport._LENGTH.pack(1000) + bytes(100))
    a.sock.close()
    assert b.receive() is None
    b.sock.close()


@KINDS
def test_an_oversize_frame_is_refused_before_it_is_read(kind, monkeypatch):
    monkeypatch.setattr(transport, "MAX_FRAME", 1 << 20)
    a, b = pair(kind)
    with ThreadPoolExecutor(1) as pool:
        if kind == "unix":
            pool.submit(a.send, bytes(2 << 20))
        else:
            a.sock.send(transport._LENGTH.pack((1 << 32) - 1))
        with pytest.raises(OSError, match="exceeds the limit of 1048576"):
            b.receive()
        b.sock.close()  # a sender that still waits for room ends with it
    a.sock.close()


class Frames(transport.FrameProtocol):
    def __init__(self):
        super().__init__()
        self.frames = []

    def frame_received(self, frame):
        self.frames.append(bytes(frame))


@given(st.lists(st.binary(max_size=40), max_size=6), st.lists(st.integers(1, 50)))
def test_a_stream_cut_anywhere_gives_whole_frames(frames, cuts):
    stream, reader = b"".join(map(transport.framed, frames)), Frames()
    for size in [*cuts, len(stream)]:
        reader.data_received(stream[:size])
        stream = stream[size:]
    assert reader.frames == frames


@given(st.binary(max_size=200))
def test_a_stream_of_anything_gives_frames_within_the_limit_or_an_error(data):
    reader = Frames()
    with contextlib.suppress(OSError):  # a length above the limit
        reader.data_received(data)
    assert sum(4 + len(frame) for frame in reader.frames) <= len(data)


# ---- plans and results --------------------------------------------------------------------------------------------


def test_in_process_executes_in_order():
    runner = Runner()
    executor = InProcess(runner)
    executor.submit(plan_of(1))
    executor.submit(plan_of(2))
    assert runner.executed == []
    assert [executor.collect().step_id, executor.collect().step_id] == [1, 2]


@HOSTS
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_depth_2_keeps_the_order(host, num_ranks):
    with Group(num_ranks, host) as group:
        executor = group.executor
        executor.submit(plan_of(0))
        for step in range(1, 50):
            executor.submit(plan_of(step, num_rows=step))
            assert same(executor.collect(), expected(plan_of(step - 1, num_rows=max(1, step - 1))))
        executor.collect()
        time.sleep(0.05)  # ranks other than 0 are not waited for
        assert all(runner.executed == list(range(50)) for runner in group.runners)


@HOSTS
def test_a_plan_of_four_million_ids_and_its_result_pass(host):
    plan = plan_of(5, num_ids=4_000_000)
    with Group(2, host) as group:
        group.executor.submit(plan)
        assert same(group.executor.collect(), expected(plan))


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
            results = future.result(30)
        finally:
            group.executor.close()
    assert all(same(r, expected(p, 6_000_000)) for r, p in zip(results, plans, strict=True))


def test_submit_returns_while_the_runner_computes():
    with Group() as group:
        group.runners[0].go.clear()
        start = time.monotonic()
        for step in range(2):
            group.executor.submit(plan_of(step, num_rows=256, num_ids=8192))
        assert time.monotonic() - start < 1
        group.runners[0].go.set()
        assert [group.executor.collect().step_id for _ in range(2)] == [0, 1]


# ---- launched before the last result ------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
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
def test_without_a_device_one_thread_does_it_all(host):
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
        with pytest.raises(RunnerFault, match="rank 1 failed: ValueError: step 20 is bad"):
            group.executor.collect()


@HOSTS
def test_a_failing_launch_is_told_after_the_results_before_it(host):
    with Group(1, host) as group:
        runner = group.runners[0]
        runner.go.clear()
        for step in (0, -7, 2):
            group.executor.submit(plan_of(step))
        wait_until(lambda: len(runner.launched) == 2)
        runner.go.set()
        assert group.executor.collect().step_id == 0
        with pytest.raises(RunnerFault, match=r"rank 0 failed: ValueError: step -7 cannot be launched\.$"):
            group.executor.collect()
        assert [step for step, _ in runner.launched] == [0, -7], "nothing is launched after a fault"


def test_a_runner_stuck_in_a_step_leaves_with_its_engine():
    with Group() as group:
        group.runners[0].go.clear()
        group.executor.submit(plan_of(0))
        wait_until(lambda: len(group.runners[0].launched) == 1)
        group.executor.close()
        group.threads[0].join(5)
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
            with pytest.raises(RunnerFault) as error:
                group.executor.collect()
            assert error.value.rank == rank
            assert str(error.value) == f"The runner of rank {rank} failed: ValueError: step 0 is bad."
    assert "Traceback" in caplog.text  # here the runner's log is ours


@HOSTS
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("blocked_in", ["collect", "submit", "accept"])
def test_close_wakes_whoever_is_blocked(host, num_ranks, blocked_in):
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


def test_a_lost_rank_is_seen_while_another_one_does_not_read():
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
        assert waiting.result(5) < 0.005


@HOSTS
def test_a_runner_whose_result_is_too_large_is_lost(host, monkeypatch):
    monkeypatch.setattr(transport, "MAX_FRAME", 1 << 20)
    with Group(1, host, num_out=1 << 19) as group:
        group.executor.submit(plan_of(0))
        with pytest.raises(RunnersLost, match="exceeds the limit") as error:
            group.executor.collect()
        assert error.value.rank == 0


# ---- who may connect ----------------------------------------------------------------------------------------------


def dial(address: Address) -> socket.socket:
    sock = socket.socket(address.family, address.kind)
    sock.connect(address.endpoint)
    sock.settimeout(5)
    return sock


@HOSTS
def test_strangers_are_dropped_and_hold_nobody_up(host):
    executor = SocketExecutor(1)
    address = executor.address(0, host)
    silent, wrong, short = (dial(address) for _ in range(3))
    wrong.sendall(b"x" * 32)
    short.sendall(b"x")
    with ThreadPoolExecutor(2) as pool:
        accepted = pool.submit(executor.accept, 10)
        assert wrong.recv(1) == b""
        assert not accepted.done()
        start = time.monotonic()
        serving = pool.submit(serve_steps, address, Runner())
        accepted.result(5)
        assert time.monotonic() - start < 1
        executor.submit(plan_of(0))
        assert executor.collect().step_id == 0
        for sock in (silent, short):
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        executor.close()
        serving.result(5)


def test_a_secret_is_good_for_one_connection_and_never_printed():
    executor = SocketExecutor(2)
    first, second = executor.address(0), executor.address(1)
    assert first.secret != second.secret
    assert repr(first.secret) not in repr(first)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(executor.accept, 10)
        rank_0 = connect(first)
        again = connect(first)
        assert again.receive() is None
        rank_1 = connect(second)
        accepted.result(5)
    executor.close()
    assert rank_0.receive() is None
    assert rank_1.receive() is None


def test_the_socket_is_private_and_removed_once_all_have_connected():
    executor = SocketExecutor(1)
    address = executor.address(0)
    folder = os.path.dirname(address.endpoint)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    wire = connect(address)
    executor.accept(5)
    assert not os.path.exists(folder)
    executor.close()
    wire.sock.close()


def test_ranks_that_do_not_connect_in_time_are_named():
    executor = SocketExecutor(3)
    wire = connect(executor.address(1))
    with pytest.raises(RunnersLost, match=r"Ranks \[0, 2\] did not connect within 0 s") as error:
        executor.accept(0.05)
    assert error.value.rank == 0
    wire.sock.close()


# ---- real processes -----------------------------------------------------------------------------------------------


@pytest.mark.long
@HOSTS
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_plans_arrive_whole_in_other_processes_and_a_kill_is_noticed(host, num_ranks):
    with processes(num_ranks, host) as (executor, ranks):
        plans = [plan_of(i, num_rows=1 + 50 * i, num_ids=1000 * i) for i in range(6)]
        executor.submit(plans[0])
        for before, plan in pairwise(plans):
            executor.submit(plan)
            assert same(executor.collect(), expected(before))
        assert same(executor.collect(), expected(plans[-1]))

        victim = num_ranks - 1
        executor.submit(failing(6, -1))
        time.sleep(0.1)
        ranks[victim].kill()
        start = time.monotonic()
        with pytest.raises(RunnersLost, match=f"Rank {victim} is gone") as error:
            executor.collect()
        assert time.monotonic() - start < 1
        assert error.value.rank == victim


@pytest.mark.long
@HOSTS
def test_a_death_between_steps_is_noticed_by_the_next_one(host):
    with processes(2, host) as (executor, ranks):
        executor.submit(plan_of(0))
        executor.collect()
        ranks[1].kill()
        ranks[1].join()
        with pytest.raises(RunnersLost) as error:  # noqa: PT012  (TCP takes the plan and then says that nobody is there)
            executor.submit(failing(1, -1))
            executor.collect()
        assert error.value.rank == 1


@pytest.mark.long
@HOSTS
def test_runners_end_with_their_engine(host):
    with processes(2, host) as (executor, ranks):
        executor.close()
        for process in ranks:
            process.join(10)
            assert process.exitcode == 0


# ---- Ray ----------------------------------------------------------------------------------------------------------


def actors(num_ranks: int):
    import ray

    @ray.remote(num_cpus=0, max_restarts=0, max_concurrency=4)
    class Actor:
        def __init__(self, rank):
            self.runner = Runner(rank)

        def attach(self, address):
            threading.Thread(target=serve_steps, args=(address, self.runner, self.runner.rank), daemon=True).start()

    return [Actor.remote(rank) for rank in range(num_ranks)]


@pytest.fixture
def group_of_actors(ray_session):
    import ray

    here = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(here)  # the actors cannot import the tests
    group = actors(2)
    yield group
    for actor in group:
        ray.kill(actor)
    ray.cloudpickle.unregister_pickle_by_value(here)


@pytest.mark.long
class TestActors:
    @pytest.fixture
    def executor(self, group_of_actors):
        executor = SocketExecutor(2)
        for rank, actor in enumerate(group_of_actors):
            actor.attach.remote(executor.address(rank))
        executor.accept(90)  # on cores that another server has busy, a process takes long to start
        yield executor
        executor.close()

    def test_depth_2_keeps_the_order(self, executor):
        executor.submit(plan_of(0))
        for step in range(1, 20):
            executor.submit(plan_of(step, num_ids=step))
            assert same(executor.collect(), expected(plan_of(step - 1, num_ids=step - 1)))
        executor.collect()

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_failing_step_is_one_sentence(self, executor, rank):
        executor.submit(failing(0, rank))
        executor.submit(plan_of(1))
        with pytest.raises(RunnerFault) as error:
            executor.collect()
        assert str(error.value) == f"The runner of rank {rank} failed: ValueError: step 0 is bad."
        assert error.value.rank == rank

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_killed_actor_is_noticed_mid_step(self, executor, rank, group_of_actors):
        import ray

        executor.submit(plan_of(0))
        executor.collect()
        executor.submit(failing(1, -1))
        time.sleep(0.2)
        ray.kill(group_of_actors[rank])
        start = time.monotonic()
        with pytest.raises(RunnersLost, match=f"Rank {rank} is gone") as error:
            executor.collect()
        assert time.monotonic() - start < 1
        assert error.value.rank == rank

    def test_close_wakes_collect(self, executor):
        executor.submit(failing(0, -1))
        with ThreadPoolExecutor(1) as pool:
            blocked = pool.submit(executor.collect)
            time.sleep(0.2)
            assert not blocked.done()
            executor.close()
            with pytest.raises(RunnersLost, match="closed"):
                blocked.result(1)
