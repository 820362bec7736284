"""The supervisor's watch over an engine, without Ray: when it replaces the engine, and its error if it cannot
continue."""

import asyncio
import threading
from unittest.mock import AsyncMock, Mock

import pytest
from ray.exceptions import RayError

from actors.engine import supervisor as supervisor_module
from actors.engine.autoscaling import EngineFigures
from actors.engine.supervisor import Supervisor
from runtime.base.config import EngineConfig
from runtime.base.types import CallboardError
from tests.support.engine.links import eventually

FIGURES = EngineFigures(0, 0, 0, 1, 0, 1, 0)


class Method:
    """A method of an actor handle."""

    def __init__(self, answer):
        self.remote = answer


class FakeActor:
    """An engine actor that can die or freeze."""

    def __init__(self):
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.frozen = False
        self.wait_for_exit, self.health = Method(lambda: self.ended), Method(self._health)
        self.figures = Method(self._figures)

    async def _health(self):
        if self.frozen:
            await asyncio.Event().wait()
        return ""

    async def _figures(self):
        await self._health()
        if self.ended.done():
            raise RayError("it is dead")
        return FIGURES


@pytest.fixture
async def watched(monkeypatch):
    """A supervisor and the actors that it started; `killed` has how each was ended."""
    killed = []
    monkeypatch.setattr(supervisor_module, "_HEALTH_PERIOD_S", 0.01)
    monkeypatch.setattr(supervisor_module, "_HEALTH_TIMEOUT_S", 0.2)
    monkeypatch.setattr(supervisor_module.ray, "kill", lambda actor: killed.append("ray"))
    monkeypatch.setattr(supervisor_module.os, "kill", lambda pid, number: killed.append((pid, number)))
    supervisor, actors = Supervisor(EngineConfig(), "app/engine/x", None, False), []

    async def start_engine():
        actors.append(FakeActor())
        supervisor._pid = 12345
        return actors[-1]

    monkeypatch.setattr(supervisor, "_start_engine", start_engine)
    await supervisor.start()
    yield supervisor, actors, killed
    supervisor._watch.cancel()


async def test_a_frozen_engine_is_killed_and_replaced(watched):
    supervisor, actors, killed = watched
    await asyncio.sleep(0.05)
    assert len(actors) == 1
    actors[0].frozen = True
    await eventually(lambda: len(actors) == 2)
    assert killed == [(12345, 9), "ray"]
    assert (supervisor.num_restarts, supervisor.failed) == (1, None)


def as_started(monkeypatch, engine):
    """The actor handles that Ray returns next: `engine`."""
    actor = Mock()
    actor.options.return_value.remote.return_value = engine
    monkeypatch.setattr(supervisor_module.ray, "remote", lambda **_: lambda _: actor)
    monkeypatch.setattr(supervisor_module, "engine_options", lambda group: {})
    monkeypatch.setattr(supervisor_module, "announce_engine", lambda application: None)
    return actor


async def test_an_engine_that_freezes_while_loading_is_killed(monkeypatch):
    engine, killed = FakeActor(), []
    engine.frozen = True
    engine.start, engine.pid = Method(asyncio.Event().wait), Method(AsyncMock(return_value=12345))
    as_started(monkeypatch, engine)
    monkeypatch.setattr(supervisor_module, "_HEALTH_PERIOD_S", 0.01)
    monkeypatch.setattr(supervisor_module, "_START_TIMEOUT_S", 0.05)
    monkeypatch.setattr(supervisor_module.ray, "kill", lambda actor: killed.append("ray"))
    monkeypatch.setattr(supervisor_module.os, "kill", lambda pid, number: killed.append((pid, number)))
    with pytest.raises(CallboardError, match=r"^The engine's process has not answered for 0\.05 s\.$"):
        await asyncio.wait_for(Supervisor(EngineConfig(), "app/engine/x", None, False).start(), 5)
    assert killed == [(12345, 9), "ray"]


async def test_an_engine_may_load_for_longer_than_it_may_freeze(monkeypatch):
    engine = FakeActor()
    engine.start, engine.pid = Method(lambda: asyncio.sleep(0.1)), Method(AsyncMock(return_value=12345))
    as_started(monkeypatch, engine)
    monkeypatch.setattr(supervisor_module, "_HEALTH_PERIOD_S", 0.01)
    monkeypatch.setattr(supervisor_module, "_START_TIMEOUT_S", 0.05)
    assert await Supervisor(EngineConfig(), "app/engine/x", None, False)._start_engine() is engine


async def test_ray_ends_an_engine_outside_event_loops(watched, monkeypatch):
    """Its head node may be lost, and the replica answers Serve meanwhile."""
    _, actors, _ = watched
    threads = []
    monkeypatch.setattr(supervisor_module.ray, "kill", lambda actor: threads.append(threading.current_thread()))
    actors[0].ended.set_result(None)
    await eventually(lambda: len(actors) == 2)
    assert threads != [threading.current_thread()]


async def test_a_lost_head_stops_only_the_start_of_engines(monkeypatch):
    """Ray's call that creates a named actor blocks until the head answers; the replica answers Serve meanwhile."""
    is_back, engine = threading.Event(), FakeActor()
    engine.start, engine.pid = Method(AsyncMock()), Method(AsyncMock(return_value=12345))
    actor = as_started(monkeypatch, engine)
    actor.options.return_value.remote.side_effect = lambda *_: is_back.wait(60) and engine
    starting = asyncio.create_task(Supervisor(EngineConfig(), "app/engine/x", None, False)._start_engine())
    await eventually(lambda: actor.options.return_value.remote.called)
    assert not starting.done()
    is_back.set()
    assert await starting is engine


@pytest.mark.parametrize("how", ["dies", "step thread ends"])
async def test_an_ended_engine_is_replaced_and_nothing_is_killed(watched, how):
    _, actors, killed = watched
    if how == "dies":
        actors[0].ended.set_exception(RayError("killed"))
    else:
        actors[0].ended.set_result(None)
    await eventually(lambda: len(actors) == 2)
    assert killed == ["ray"]


async def test_a_failed_watch_is_reported_to_serve(watched, monkeypatch):
    supervisor, actors, _ = watched

    async def fail():
        raise ValueError("unheard of")

    monkeypatch.setattr(supervisor, "_start_engine", fail)
    actors[0].ended.set_result(None)
    await eventually(lambda: supervisor.failed is not None)
    assert supervisor.failed == "The engine's supervisor failed: ValueError: unheard of"


@pytest.mark.parametrize("how", ["frozen", "dead"])
async def test_a_lost_engine_reports_no_figures(watched, monkeypatch, how):
    supervisor, actors, _ = watched
    monkeypatch.setattr(supervisor_module, "_FIGURES_TIMEOUT_S", 0.05)
    assert await supervisor.figures() == FIGURES
    if how == "frozen":
        actors[0].frozen = True
    else:
        actors[0].ended.set_exception(RayError("killed"))
    assert await supervisor.figures() is None
    await eventually(lambda: len(actors) == 2)
    assert await supervisor.figures() == FIGURES


@pytest.mark.parametrize("leaves_for", ["the same model", "another model", "nothing"])
@pytest.mark.parametrize("fronts_leave", [False, True])
async def test_a_replaced_engine_serves_until_its_fronts_leave(
    watched, monkeypatch, leaves_for: str, fronts_leave: bool
):
    """It serves if they leave soon. Otherwise it refuses new requests at once: fronts use another engine, or wait for
    the next."""
    supervisor, (engine,), _ = watched
    supervisor._name = "app/engine/old/x"
    connections, drained = 2, []

    async def has_healthy_engine(prefix, except_for):
        return {"app/engine/old/": leaves_for == "the same model", "app/engine/": leaves_for == "another model"}[prefix]

    monkeypatch.setattr(supervisor_module, "_DRAIN_POLL_S", 0.01)
    monkeypatch.setattr(supervisor_module, "has_healthy_engine", has_healthy_engine)
    engine.stats = Method(AsyncMock(side_effect=lambda: {"connections": connections}))
    engine.drain = Method(AsyncMock(side_effect=drained.append))
    engine.num_live = Method(AsyncMock(return_value=0))
    draining = asyncio.create_task(supervisor.drain(1e9 if fronts_leave else 0.4))
    if leaves_for == "another model":
        await eventually(lambda: engine.stats.remote.await_count > 2)
        assert not drained
        connections = 0 if fronts_leave else 2
    await asyncio.wait_for(draining, 60)
    assert drained == [supervisor_module.DRAINING]
