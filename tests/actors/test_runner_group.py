"""The ranks of one engine start together, and are lost together."""

import signal
import subprocess
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from actors.runners import runner_group
from actors.runners.runner_group import RunnerGroup
from actors.runners.step_channel import RunnersLost, serve_steps
from actors.wire.transport import connect
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError
from tests.support.engine.executor_group import Runner, expected, failing, plan_of, same

INFO = ModelInfo("fingerprint", 32000, 128, (0,), 100, 16, "float32", "cpu")
PHASES = ["location", "join", "load", "open", "attach"]


class Call:
    """A method of a fake actor, as Ray's handles have them."""

    def __init__(self, actor: "Rank", name: str) -> None:
        self._actor, self._name = actor, name
        self.answer: Future[Any] = Future()

    def remote(self, *arguments: Any) -> "Call":
        self._actor.called.append((self._name, arguments))
        threading.Thread(target=self._run, args=arguments, daemon=True).start()
        return self

    def _run(self, *arguments: Any) -> None:
        disturb = self._actor.disturbances.get(self._name)
        try:
            if disturb is not None:
                disturb(self._actor)
            self.answer.set_result(getattr(self._actor, f"_{self._name}")(*arguments))
        except Exception as e:
            self.answer.set_exception(e)

    def future(self) -> Future[Any]:
        return self.answer


class Rank:
    """An actor with a process of its own that tests can kill and stop."""

    def __init__(self, rank: int, num_blocks: int) -> None:
        self.rank, self.info = rank, replace(INFO, num_kv_blocks=num_blocks)
        self.called: list[tuple[str, tuple[Any, ...]]] = []
        self.disturbances: dict[str, Any] = {}
        self.process = subprocess.Popen(["sleep", "60"])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return Call(self, name)

    def _location(self) -> tuple[str, int]:
        return "here", self.process.pid

    def _join(self, config: EngineConfig, rank: int) -> bytes:
        return b"handle of %d" % rank

    def _load(self, handles: list[bytes]) -> ModelInfo:
        return self.info

    def _open(self, num_kv_blocks: int) -> ModelInfo:
        return replace(self.info, num_kv_blocks=num_kv_blocks)

    def _attach(self, address: Any) -> None:
        threading.Thread(target=serve_steps, args=(connect(address), Runner(self.rank), self.rank), daemon=True).start()

    def _wait_for_exit(self) -> None:
        self.process.wait()

    def _sleep(self) -> None: ...

    _wake = _sleep

    def _load_adapter(self, index: int, path: str, digest: str) -> None: ...


class Group(RunnerGroup):
    """Two ranks; the ranks of the first start are disturbed."""

    def __init__(self, **disturbances: Any) -> None:
        super().__init__(EngineConfig(tensor_parallel_size=2), None, gpu=False)
        self.disturbances = disturbances  # what happens to rank 1, by phase
        self.starts: list[list[Rank]] = []

    def _make_runners(self) -> list[Rank]:
        for rank in (rank for ranks in self.starts for rank in ranks):
            assert rank.process.wait(timeout=60) == -signal.SIGKILL, "it is gone before another needs its place"
        ranks = [Rank(0, 70), Rank(1, 60)]
        if not self.starts:
            ranks[1].disturbances = self.disturbances
        self.starts.append(ranks)
        return ranks


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner_group, "_WATCH_S", 0.02)
    monkeypatch.setattr(runner_group.ray, "kill", lambda actor: None)
    monkeypatch.setattr(
        runner_group,
        "_host_and_process",
        lambda node, pid: ("", runner_group.LocalProcess(pid)) if node == "here" else ("h", None),
    )
    made: list[Group] = []

    def make(**disturbances: Any) -> Group:
        made.append(Group(**disturbances))
        return made[-1]

    yield make
    for group in made:
        for rank in (rank for ranks in group.starts for rank in ranks):
            rank.process.kill()
            rank.process.wait()
        if group._ranks is not None:
            group._ranks.kill()


def kill(rank: Rank) -> None:
    rank.process.kill()
    rank.process.wait()
    threading.Event().wait()  # Ray reports it later


def test_a_rank_that_never_reports_its_process_is_replaced(make, monkeypatch):
    """The rank is stopped before it can report, so the group lacks a process to watch."""
    monkeypatch.setattr(runner_group, "_BEGIN_S", 0.1)
    monkeypatch.setattr(runner_group.ray, "kill", lambda actor: actor.process.kill())
    group = make(location=lambda rank: threading.Event().wait())
    group.start()
    assert len(group.starts) == 2


def stop(rank: Rank) -> None:
    rank.process.send_signal(signal.SIGSTOP)
    threading.Event().wait()


def test_all_ranks_do_a_phase_before_any_begins_the_next(make):
    group = make()
    executor, info = group.start()
    (ranks,) = group.starts
    assert [[name for name, _ in rank.called if name != "wait_for_exit"] for rank in ranks] == [PHASES, PHASES]
    handles = [b"handle of 0", b"handle of 1"]
    assert [dict(rank.called)["load"] for rank in ranks] == [(handles,)] * 2
    assert [dict(rank.called)["open"] for rank in ranks] == [(60,)] * 2
    assert info.num_kv_blocks == 60, "the least that a rank offers"
    executor.submit(plan_of(1))
    assert same(executor.collect(), expected(plan_of(1)))


@pytest.mark.parametrize("phase", PHASES[1:])
@pytest.mark.parametrize("disturb", [kill, stop])
def test_a_rank_lost_during_the_start_restarts_all_ranks(make, phase, disturb):
    group = make(**{phase: disturb})
    executor, _ = group.start()
    assert len(group.starts) == 2
    assert all(rank.process.poll() is None for rank in group.starts[1])
    executor.submit(plan_of(1))
    assert same(executor.collect(), expected(plan_of(1)))


def test_ranks_may_miss_another_before_its_process_ends(make, monkeypatch):
    """Errors that they report of the lost rank are not their own."""

    def end_soon(rank: Rank) -> None:
        threading.Timer(0.1, rank.process.kill).start()
        threading.Event().wait()

    def miss(rank: Rank) -> None:
        raise RayTaskError("load", "traceback", CallboardError("Rank 1 cannot be reached.")).as_instanceof_cause()

    group = make(load=end_soon)
    monkeypatch.setattr(runner_group, "_WATCH_S", 1.0)
    make_runners = group._make_runners

    def make_missing() -> list[Rank]:
        ranks = make_runners()
        if len(group.starts) == 1:
            ranks[0].disturbances = {"load": miss}
        return ranks

    group._make_runners = make_missing
    group.start()
    assert len(group.starts) == 2


def test_a_group_that_is_lost_twice_is_given_up(make):
    group = make(load=kill)
    make_runners = group._make_runners

    def make_fragile() -> list[Rank]:
        ranks = make_runners()
        ranks[1].disturbances = {"load": kill}
        return ranks

    group._make_runners = make_fragile
    with pytest.raises(RunnersLost, match=r"Rank 1 is gone: its process has ended\.$"):
        group.start()
    assert len(group.starts) == 2


def test_an_error_of_a_rank_names_the_rank(make):
    def fail(rank: Rank) -> None:
        raise RayTaskError("load", "traceback", CallboardError("There is too little memory.")).as_instanceof_cause()

    group = make(load=fail)
    make_runners = group._make_runners

    def make_waiting() -> list[Rank]:
        ranks = make_runners()
        ranks[0].disturbances = {"load": lambda rank: threading.Event().wait()}
        return ranks

    group._make_runners = make_waiting
    with pytest.raises(CallboardError, match=r"^Rank 1: There is too little memory\.$"):
        group.start()
    (ranks,) = group.starts
    assert [rank.process.wait(timeout=60) for rank in ranks] == [-signal.SIGKILL] * 2


def test_ranks_that_disagree_are_reported(make):
    def change(rank: Rank) -> None:
        rank.info = replace(rank.info, fingerprint="another")

    with pytest.raises(CallboardError, match="Rank 1 has loaded another model than rank 0: its fingerprint is another"):
        make(load=change).start()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_while_serving_ends_the_wait_for_it(make, number):
    """Its last collective operation is done, so that no other rank misses it."""
    group = make()
    executor, _ = group.start()
    executor.submit(failing(1, -1))
    group.starts[0][1].process.send_signal(number)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(executor.collect)
        end = time.monotonic() + 60
        while not answer.done() and time.monotonic() < end:
            group.check()
            time.sleep(0.02)
        executor.close()
        with pytest.raises(RunnersLost, match=r"Rank 1 is stopped by a signal\.|has ended|was closed"):
            answer.result()
    assert time.monotonic() < end


def test_a_load_does_not_wait_for_a_rank_that_hangs(make):
    """The engine gives the ranks up by closing the step channel; a load that waited on would keep it from others."""
    group, hangs = make(load_adapter=lambda rank: threading.Event().wait(60)), ThreadPoolExecutor(1)
    executor, _ = group.start()
    loading = hangs.submit(group.load_adapter, 1, "/a", "digest")
    executor.close(RunnersLost("The engine gave them up."))
    with pytest.raises(RunnersLost, match="gave them up"):
        loading.result(60)
    hangs.shutdown()


def test_ranks_sleep_and_wake_together(make):
    def refuse(rank: Rank) -> None:
        raise RayTaskError("wake", "traceback", CallboardError("There is no room.")).as_instanceof_cause()

    group = make(wake=refuse)
    group.start()
    (ranks,) = group.starts
    group.set_sleep(1)
    assert [rank.called[-1] for rank in ranks] == [("sleep", ())] * 2
    with pytest.raises(CallboardError, match=r"^Rank 1: There is no room\.$") as refused:
        group.set_sleep(0)
    assert not isinstance(refused.value, RunnersLost), "it sleeps on"
    group.set_sleep(2)
    assert [rank.process.wait(60) for rank in ranks] == [-signal.SIGKILL] * 2
    with pytest.raises(RunnersLost):
        group.set_sleep(0)
    group.start()  # as the call that wakes them expects
    assert len(group.starts) == 2


@pytest.mark.parametrize("level", [0, 1])
def test_a_rank_that_hangs_in_sleep_or_wake_up_is_lost(make, monkeypatch, level):
    monkeypatch.setattr(runner_group, "_SLEEP_S", 0.1)
    group = make(**{"sleep" if level else "wake": lambda rank: threading.Event().wait()})
    group.start()
    with pytest.raises(RunnersLost, match="Rank 1 has not answered within"):
        group.set_sleep(level)
