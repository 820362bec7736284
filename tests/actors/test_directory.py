"""The directory: when Ray's head node does not answer, and when it is asked for a free engine."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import AsyncMock, Mock

import pytest
from ray.exceptions import RayError

from actors.ray.directory import RayDirectory, has_healthy_engine
from actors.ray.names import living_actors


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
