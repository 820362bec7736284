"""Adapters survive engines and runners that are lost, asleep or replaced. Each test is one way to lose an answer."""

import asyncio
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from actors.engine.link_server import Connection
from actors.runners.step_channel import RunnersLost
from actors.wire.engine_client import EngineRefusal, Refusal
from actors.wire.link_messages import Adapters
from benchmarks.library.make_adapter import save_adapter
from runtime.base.types import CallboardError
from runtime.features.adapter_table import AdapterTable
from tests.support.engine.adapters import MODULES, check, pace, with_adapter
from tests.support.engine.fake_runner import sequential
from tests.support.engine.groups import Group, healthy, live
from tests.support.engine.links import Engine, eventually, read, request


def fail(text):
    raise CallboardError(text)


def lose(*_):
    raise RunnersLost("Rank 0 is gone.")


def sleep_level(engine):
    return engine.loop.stats()["sleep_level"]


def runner_adapters(engine):
    return sorted(set(engine.runners[-1].adapters.values()) - {""})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_failed_rebuild_ends_the_step_thread(folders):
    """Then the supervisor starts another engine, because a surviving thread would serve nothing."""
    engine = Engine(max_loras=1)
    async with Group(engine) as group:
        start, engine.start = engine.start, lambda: fail("Out of memory.")
        engine.loop._adapters._load_onto = lose
        loading = asyncio.create_task(group.adapters.load("a", folders[0]))
        await eventually(lambda: not engine.loop._thread.is_alive())
        assert engine.loop.health() == "The engine's step thread has ended."
        engine.die()
        engine.start = start
        engine.restart()
        await asyncio.wait_for(loading, 60)
        await check(asyncio.gather(read(group, req := with_adapter(group, "a"))), [req])


async def test_progress_is_checked_for_every_reason():
    engine = Engine(step_timeout_s=1.0)
    async with Group(engine) as group:
        engine.runners[-1].hang = True
        reading = asyncio.create_task(read(group, request(0)))
        await eventually(lambda: engine.loop.core.scheduler.num_in_flight)
        engine.loop.reason = "The engine is restarting its model runners."
        engine.loop._progress = time.monotonic() - 100
        assert not engine.loop.check_progress()
        reading.cancel()


@pytest.mark.parametrize("deep", [1, 2])
async def test_adapters_load_when_a_sleeping_engine_wakes_up(deep, folders):
    engine = Engine(max_loras=2)
    async with Group(engine) as group:
        await group.sleep(deep)
        await asyncio.wait_for(group.adapters.load("a", folders[0]), 60)
        with pytest.raises(CallboardError, match="/nowhere"):
            await group.adapters.load("b", "/nowhere")
        assert (sleep_level(engine), len(engine.runners), runner_adapters(engine)) == (deep, 1, [])
        reading = asyncio.gather(read(group, req := with_adapter(group, "a")))
        start, engine.start = engine.start, lambda: fail("Too little memory.")
        if deep == 2:
            with pytest.raises(CallboardError, match="Too little memory"):
                await group.sleep(0)
            assert sleep_level(engine) == 2
            assert group.health() is None
        engine.start = start
        await group.sleep(0)
        await check(reading, [req])
        assert (len(engine.runners), runner_adapters(engine)) == (deep, [req.adapter])


async def test_runners_lost_after_a_load_get_the_adapter(folders):
    """The runners die when they have loaded it, before the step thread has the answer."""
    engine = Engine(delay_s=0.02, max_loras=1)
    async with Group(engine) as group:
        other = asyncio.create_task(read(group, request(1, max_tokens=200)))
        await eventually(lambda: engine.loop.core.scheduler.stats.steps > 2)
        adapters, loaded = engine.loop._adapters, []
        load, call = adapters._load_onto, adapters._call

        def answer_late(work):
            if loaded and not engine.loop.num_rebuilds:
                engine.delay_s, engine.runners[-1].dead = 0.0, "Rank 0 is gone."
                while not (engine.loop.num_rebuilds and engine.loop.reason is None):
                    time.sleep(0.005)
            return call(work)

        adapters._load_onto = lambda *place: (load(*place), loaded.append(place))
        adapters._call = answer_late
        await asyncio.wait_for(group.adapters.load("a", folders[0]), 60)
        assert engine.loop.num_rebuilds == 1
        req = with_adapter(group, "a")
        assert runner_adapters(engine) == [req.adapter]
        await check(asyncio.gather(read(group, req)), [req])
        assert (await asyncio.wait_for(other, 60))[0] == sequential(request(1, max_tokens=200), 512)[0]


@pytest.mark.parametrize("way", ["unloaded", "replaced"])
async def test_streams_outlive_an_engine_and_the_name(way, folders):
    engines = [Engine(delay_s=0.02, max_loras=2) for _ in range(2)]
    async with Group(*engines) as group:
        await group.adapters.load("a", folders[0])
        reading = asyncio.gather(read(group, req := with_adapter(group, "a", max_tokens=150)))
        await eventually(lambda: any(live(e) and e.loop.core.scheduler.stats.steps > 2 for e in engines))
        name_ends = group.adapters.unload("a") if way == "unloaded" else group.adapters.load("a", folders[1])
        ending = asyncio.create_task(name_ends)
        await eventually(lambda: not any(e.loop.core.extras[AdapterTable].is_open(req.adapter) for e in engines))
        (serving,) = (e for e in engines if live(e))
        (other,) = (e for e in engines if e is not serving)
        serving.die()
        await eventually(lambda: live(other) == 1)
        if way == "unloaded":
            with pytest.raises(CallboardError, match="not loaded"):
                await read(group, replace(req, request_id="new"))
            other.die()  # a fresh engine has never had it
            serving.restart()
            await eventually(lambda: live(serving) == 1)
            other = serving
            assert not ending.done()
        pace(other, 0.0)
        await check(reading, [req])
        await asyncio.wait_for(ending, 60)
        await eventually(lambda: req.adapter not in other.loop.core.extras[AdapterTable].loaded)


async def test_streams_stay_on_the_only_engine_with_their_adapter(folders):
    engines = [Engine(delay_s=0.1, max_loras=1) for _ in range(2)]
    async with Group(*engines) as group:
        await group.adapters.load("a", folders[0])
        reading = asyncio.gather(read(group, req := with_adapter(group, "a", max_tokens=300)))
        await eventually(lambda: any(live(e) and e.loop.core.scheduler.stats.steps > 2 for e in engines))
        (serving,) = (e for e in engines if live(e))
        (other,) = (e for e in engines if e is not serving)
        unloading = asyncio.create_task(group.adapters.unload("a"))
        await eventually(lambda: not serving.loop.core.extras[AdapterTable].is_open(req.adapter))
        shutil.rmtree(folders[0])
        other.die()
        other.restart()
        fresh = lambda: [link for link in healthy(group) if link.name.endswith("#2")]  # noqa: E731
        await eventually(fresh)
        await asyncio.wrap_future(serving.loop.drain("It ends."))
        await eventually(lambda: any(link.draining for link in group.links.values()))
        group._move_off_draining()
        assert live(serving) == 1
        pace(serving, 0.0)
        await check(reading, [req])
        await asyncio.wait_for(unloading, 60)


async def test_silent_fronts_do_not_keep_an_adapter(folders, monkeypatch):
    engine = Engine(delay_s=0.02, max_loras=1)
    async with Group(engine) as group:
        await group.adapters.load("a", folders[0])
        digest = with_adapter(group, "a").adapter
        (connection,) = engine.loop._connections
        engine.loop._call(partial(engine.loop._adapters.apply, connection, Adapters(needs={digest: folders[0]})))
        unloading = asyncio.create_task(group.adapters.unload("a"))
        await eventually(lambda: engine.loop._adapters.is_kept_for_fronts)
        assert not unloading.done()
        monkeypatch.setattr(Connection, "is_silent", property(lambda self: self is connection))  # it connects again
        await asyncio.wait_for(unloading, 60)


async def test_files_that_change_before_the_load_are_refused(folders):
    engine = Engine(max_loras=1)
    async with Group(engine) as group:
        load = engine.loop._adapters._load_onto

        def load_changed(*place):
            save_adapter(Path(folders[0]), MODULES, 9)
            load(*place)

        engine.loop._adapters._load_onto = load_changed
        with pytest.raises(CallboardError, match="have changed"):
            await group.adapters.load("a", folders[0])
        assert not engine.loop.core.extras[AdapterTable].loaded
        engine.loop._adapters._load_onto = load
        await group.adapters.load("a", folders[0])
        await check(asyncio.gather(read(group, req := with_adapter(group, "a"))), [req])


async def test_requests_held_for_an_adapter_count_in_the_queue(folders):
    engine = Engine(max_loras=1, max_queued_requests=2, queue_timeout_s=0.2)
    async with Group(engine) as group:
        load, may_load = engine.loop._adapters._load_onto, asyncio.Event()
        waits = partial(asyncio.run_coroutine_threadsafe, loop=asyncio.get_running_loop())
        engine.loop._adapters._load_onto = lambda *place: (waits(may_load.wait()).result(60), load(*place))
        loading = asyncio.create_task(group.adapters.load("a", folders[0]))
        await eventually(lambda: engine.loop.core.extras[AdapterTable].loaded)
        (digest,) = engine.loop.core.extras[AdapterTable].loaded
        held = [asyncio.create_task(read(group, replace(request(i), adapter=digest))) for i in range(2)]
        await eventually(lambda: len(engine.loop.requests.held) == 2)
        with pytest.raises(EngineRefusal, match="max_queued_requests") as refused:
            await read(group, replace(request(2), adapter=digest))
        assert refused.value.reason is Refusal.BUSY
        for task in held:
            with pytest.raises(EngineRefusal, match="queue_timeout_s") as late:
                await asyncio.wait_for(task, 60)
            assert late.value.reason is Refusal.LATE
        assert (len(engine.loop.requests.held), engine.loop.requests.held.sizes.num_tokens) == (0, 0)
        may_load.set()
        await loading
        await check(asyncio.gather(read(group, req := with_adapter(group, "a"))), [req])
