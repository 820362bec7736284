"""The directory while Ray's head node does not answer."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from actors.directory import RayDirectory


async def test_calls_that_ray_does_not_answer_take_no_thread_from_others(monkeypatch: pytest.MonkeyPatch):
    """A front reads and tokenises long requests in asyncio's own threads, of which there are few."""
    is_back = threading.Event()
    monkeypatch.setattr("actors.directory.living_actors", lambda prefix: is_back.wait() and ["app/engine/a#1"])
    monkeypatch.setattr("actors.directory.ray.get_actor", lambda *_: is_back.wait())
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    directory = RayDirectory("app/engine/")
    listing = asyncio.create_task(directory.changed([]))
    opening = [asyncio.create_task(directory.open_link(f"app/engine/{i}#1")) for i in range(3)]
    for task in opening:  # as a link does after a while
        done, _ = await asyncio.wait([task], timeout=0.02)
        assert not done
        task.cancel()
    assert await asyncio.wait_for(asyncio.to_thread(len, "free"), 5) == 4
    is_back.set()
    assert await asyncio.wait_for(listing, 5) == ["app/engine/a#1"]
