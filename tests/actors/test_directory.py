"""The directory: when it reads Ray's list, when Ray's head node does not answer, and which engines it finds."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
from ray.exceptions import ActorDiedError, RayError

from actors.ray import directory as directory_module
from actors.ray.directory import RayDirectory, announce_engine, has_healthy_engine
from actors.ray.names import living_actors
from runtime.base.types import CallboardError
from tests.support.engine.links import eventually

_read_again = directory_module._read_again


async def test_unanswered_ray_calls_block_no_other_call(monkeypatch: pytest.MonkeyPatch):
    """A front reads and tokenises long requests in the few threads of asyncio."""
    is_back = threading.Event()
    monkeypatch.setattr("actors.ray.directory.living_actors", lambda prefix: is_back.wait() and ["app/engine/a#1"])
    monkeypatch.setattr("actors.ray.directory.ray.get_actor", lambda *_: is_back.wait())
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    directory = RayDirectory("app/engine/")
    listing = asyncio.create_task(directory.changed([]))
    opening = [asyncio.create_task(directory.open_link(f"app/engine/{i}#1")) for i in range(3)]
    for task in opening:  # as a link does after a while
        done, _ = await asyncio.wait([task], timeout=0.02)
        assert not done
        task.cancel()
    assert await asyncio.wait_for(asyncio.to_thread(len, "free"), 60) == 4
    is_back.set()
    assert await asyncio.wait_for(listing, 60) == ["app/engine/a#1"]


async def test_the_engine_that_accepts_requests_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("actors.ray.directory._HEALTH_S", 0.05)
    health = {
        "app/engine/a#1": AsyncMock(return_value=None),
        "app/engine/loads#2": AsyncMock(return_value="The engine is loading its model."),
        "app/engine/dead#3": AsyncMock(side_effect=RayError("dead")),
        "app/engine/frozen#4": AsyncMock(side_effect=asyncio.Event().wait),
    }
    monkeypatch.setattr("actors.ray.directory.living_actors", lambda prefix: list(health))
    monkeypatch.setattr("actors.ray.directory.ray.get_actor", lambda name, _: Mock(**{"health.remote": health[name]}))
    assert await has_healthy_engine("app/engine/")
    assert not await has_healthy_engine("app/engine/", except_for="app/engine/a")


def test_an_engine_without_a_replica_is_not_listed(monkeypatch: pytest.MonkeyPatch):
    """Ray may list it forever, if its node died while the replica requested another engine."""
    named = [
        ("callboard", "app/engine/m/ghost#5"),
        ("callboard", "app/engine/m/b#4"),
        ("callboard", "app/engine/m/a#3"),
        ("callboard", "app/draft#1"),
        ("serve", "SERVE_REPLICA::app#Engine#a"),
        ("serve", "SERVE_REPLICA::app#Engine#b"),
    ]
    actors = [{"namespace": namespace, "name": name} for namespace, name in named]
    monkeypatch.setattr("actors.ray.names.ray.util.list_named_actors", lambda **_: actors)
    assert living_actors("app/engine/") == ["app/engine/m/a#3", "app/engine/m/b#4"]
    assert living_actors("app/draft") == ["app/draft#1"]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reads of Ray's list, which has the engines in `NAMES`."""
    done: list[str] = []

    def living_actors(prefix: str) -> list[str]:
        done.append(prefix)
        return [*NAMES]

    NAMES[:] = ["app/engine/m/a#1"]
    for name, seconds in {"_LISTING_S": 0.01, "_SETTLED_S": 0.1, "_REPLACED_S": 0.01}.items():
        monkeypatch.setattr(f"actors.ray.directory.{name}", seconds)
    monkeypatch.setattr("actors.ray.directory.living_actors", living_actors)
    return done


NAMES: list[str] = []


async def settled(reads: list[str]) -> int:
    """Wait until reads of Ray's list have stopped; return the number of reads."""
    while True:
        number = len(reads)
        await asyncio.sleep(0.5)
        if number == len(reads):
            return number


async def test_an_idle_directory_does_not_read_rays_list(reads: list[str]):
    directory = RayDirectory("app/engine/", idle_s=3600)
    known = await directory.changed([])
    waiting = asyncio.create_task(directory.changed(known))
    assert await settled(reads) > 1
    assert not waiting.done()
    waiting.cancel()


async def test_an_announced_engine_is_found_though_it_is_late(reads: list[str], monkeypatch: pytest.MonkeyPatch):
    """Ray's list may lack it at the first read after the announcement."""
    directory = RayDirectory("app/engine/", idle_s=3600)
    known = await directory.changed([])
    waiting = asyncio.create_task(directory.changed(known))
    number = await settled(reads)
    monkeypatch.setattr("actors.ray.directory._SETTLED_S", 3600)
    await asyncio.to_thread(_read_again, None)  # as Ray calls it in a front
    await eventually(lambda: len(reads) > number)
    NAMES.append("app/engine/m/b#2")
    assert await asyncio.wait_for(waiting, 60) == NAMES


async def test_a_dead_engine_makes_the_directory_read_rays_list(reads: list[str], monkeypatch: pytest.MonkeyPatch):
    dead = Mock(**{"open_link.remote": AsyncMock(side_effect=ActorDiedError)})
    monkeypatch.setattr("actors.ray.directory.ray.get_actor", lambda *_: dead)
    monkeypatch.setattr("actors.ray.directory.ray.get_runtime_context", Mock())
    directory = RayDirectory("app/engine/", idle_s=3600)
    known = await directory.changed([])
    waiting = asyncio.create_task(directory.changed(known))
    await settled(reads)
    NAMES[:] = ["app/engine/m/a#3"]
    with pytest.raises(CallboardError):
        await directory.open_link("app/engine/m/a#1")
    assert await asyncio.wait_for(waiting, 60) == NAMES


async def test_a_lost_announcement_costs_a_bounded_time(reads: list[str]):
    directory = RayDirectory("app/engine/", idle_s=0.2)
    known = await directory.changed([])
    waiting = asyncio.create_task(directory.changed(known))
    NAMES.clear()
    assert await asyncio.wait_for(waiting, 60) == []


def test_an_engine_is_announced_to_the_fronts_of_its_application(monkeypatch: pytest.MonkeyPatch):
    names = ["SERVE_REPLICA::app#Front#a", "SERVE_REPLICA::app#Engine#b", "SERVE_REPLICA::other#Front#c", "ended"]
    actors = [{"namespace": "serve", "name": name} for name in [*names, "SERVE_REPLICA::app#Front#ended"]]
    called = []

    def get_actor(name: str, namespace: str) -> SimpleNamespace:
        if name.endswith("ended"):
            raise ValueError(name)
        return SimpleNamespace(__ray_call__=SimpleNamespace(remote=lambda function: called.append((name, function))))

    monkeypatch.setattr("actors.ray.names.ray.util.list_named_actors", lambda **_: actors)
    monkeypatch.setattr("actors.ray.directory.ray.get_actor", get_actor)
    announce_engine("app")
    assert called == [("SERVE_REPLICA::app#Front#a", _read_again)]
