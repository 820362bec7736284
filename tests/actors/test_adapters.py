"""Adapters behind an EngineGroup, over real sockets: they are loaded and unloaded, and survive the loss of runners,
engines and fronts."""

import asyncio
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from actors.runners.step_channel import RunnersLost
from actors.wire.engine_client import EngineRefusal
from benchmarks.library.make_adapter import save_adapter
from runtime.base.types import CallboardError
from runtime.features.adapter_table import AdapterTable
from runtime.loading.sources.names import CLOUD_PACKAGES
from tests.support.engine.adapters import MODULES, check, pace, with_adapter
from tests.support.engine.fake_runner import sequential
from tests.support.engine.groups import Group, healthy, live
from tests.support.engine.links import Engine, eventually, link_to, read, request


async def test_adapters_load_and_unload_at_all_engines_and_fronts(folders):
    a, b, c = folders
    engines = [Engine(delay_s=0.002, lora=(f"a={a}",), max_loras=2) for _ in range(2)]
    async with Group(*engines) as group:
        other = link_to(*engines)
        await other.start()
        await eventually(lambda: len(healthy(other)) == 2)
        await group.adapters.load("b", b)
        await eventually(lambda: other.adapters.served().keys() == group.adapters.served().keys() == {"a", "b"})
        asked = [request(0), with_adapter(other, "a"), with_adapter(other, "b"), with_adapter(other, "b", 1)] * 3
        asked = [replace(req, request_id=f"r{i}") for i, req in enumerate(asked)]
        await check(asyncio.gather(*(read(other, req) for req in asked)), asked)
        assert all(e.loop.stats()["steps"] for e in engines)

        with pytest.raises(CallboardError, match="max_loras"):
            await group.adapters.load("c", c)
        with pytest.raises(CallboardError, match="/nowhere"):
            await group.adapters.load("d", "/nowhere")
        await group.adapters.load("again", b)  # the same files use no more room
        await group.adapters.unload("b")
        assert group.adapters.served().keys() == {"a", "again"}

        # Its requests go on, new requests are refused, and it is unloaded when they have ended.
        asked = [with_adapter(group, "a", max_tokens=80)]
        for engine in engines:
            pace(engine, 0.1)
        reading = asyncio.gather(read(group, asked[0]))
        await eventually(lambda: sum(map(live, engines)) == 1)
        unloading = asyncio.create_task(group.adapters.unload("a"))
        await eventually(lambda: other.adapters.served().keys() == {"again"})
        with pytest.raises(CallboardError, match="not loaded"):
            await read(group, replace(asked[0], request_id="late"))
        assert not unloading.done()
        for engine in engines:
            pace(engine, 0.0)
        await check(reading, asked)
        await unloading
        await group.adapters.load("c", c)
        await check(asyncio.gather(read(other, req := with_adapter(group, "c"))), [req])
        other.close()


async def test_a_replacement_is_ready_before_the_old_one_leaves(folders, monkeypatch):
    timers: list[threading.Timer] = []
    monkeypatch.setattr(threading.Timer, "start", lambda self: timers.append(self))

    def time_passes():
        while timers:
            timer = timers.pop()
            timer.function(*timer.args)

    a, b, c = folders
    engines = [Engine(lora=(f"x={a}",), max_loras=2) for _ in range(2)]
    async with Group(*engines) as group:
        other = link_to(*engines)
        await other.start()
        await eventually(lambda: len(healthy(other)) == 2)
        old = with_adapter(group, "x", max_tokens=400)
        loads, may_load = [e.load_adapter for e in engines], threading.Event()

        def load_late(load, *place):
            assert may_load.wait(60)
            load(*place)

        for engine, load in zip(engines, loads, strict=True):
            engine.loop._adapters._load_onto = partial(load_late, load)
            pace(engine, 0.1)
        reading = asyncio.gather(read(group, old))
        await eventually(lambda: sum(map(live, engines)) == 1)
        replacing = asyncio.create_task(group.adapters.load("x", b))
        await eventually(lambda: all(link.adapters["x"].held for link in group.links.values()))
        late = link_to(*engines)  # it arrives while the name belongs to an adapter that is still loading
        await late.start()
        await eventually(lambda: len(healthy(late)) == 2)
        for i, front in enumerate((group, other, late), 1):
            assert front.adapters.served()["x"].digest == old.adapter
            await check(asyncio.gather(read(front, req := with_adapter(front, "x", i, max_tokens=2))), [req])
        may_load.set()
        await replacing
        new = with_adapter(group, "x", 4, max_tokens=2)
        assert new.adapter != old.adapter
        # A front accepts the name of an adapter that it has not received yet.
        asked = [new, replace(old, request_id="unaware", params=new.params)]
        await check(asyncio.gather(*(read(other, req) for req in asked)), asked)
        with pytest.raises(CallboardError, match="max_loras"):  # both are needed
            await group.adapters.load("y", c)
        time_passes()
        await eventually(lambda: not any(e.loop.core.extras[AdapterTable].is_open(old.adapter) for e in engines))
        with pytest.raises(CallboardError, match="not loaded"):
            await read(other, replace(asked[1], request_id="too late"))
        assert live(engines[0]) + live(engines[1]) == 1
        for engine in engines:
            pace(engine, 0.0)
        await check(reading, [old])
        free = lambda: all(len(e.loop.core.extras[AdapterTable].loaded) == 1 for e in engines)  # noqa: E731
        await eventually(free)

        for bad in ("/nowhere", b):  # the last one has other files by now
            if bad == b:
                save_adapter(Path(b), MODULES, 9, r=64)
            with pytest.raises(CallboardError):
                await group.adapters.load("x", bad)
            for i, front in enumerate((group, other), 5):
                await check(asyncio.gather(read(front, req := replace(new, request_id=f"{bad}{i}"))), [req])
                assert front.adapters.served()["x"].digest == new.adapter
        await group.adapters.load("x", c)
        await eventually(lambda: other.adapters.served()["x"].digest not in (old.adapter, new.adapter))
        await eventually(lambda: time_passes() or free())  # a front may start its timer late
        other.close()
        late.close()


async def test_adapters_survive_every_death(folders):
    a, b, _ = folders
    engines = [Engine(delay_s=0.1, lora=(f"a={a}",), max_loras=3) for _ in range(2)]
    async with Group(*engines) as group:
        await group.adapters.load("b", b)
        asked = [with_adapter(group, "ab"[i % 2], i, max_tokens=80) for i in range(4)]
        reading = asyncio.gather(*(read(group, req) for req in asked))
        await eventually(lambda: all(e.loop.core.scheduler.stats.steps > 2 for e in engines))
        engines[0].runners[-1].dead = "Rank 0 is gone."
        await eventually(lambda: len(engines[0].runners) == 2 and engines[0].loop.reason is None)
        await eventually(lambda: len(healthy(group)) == 2)
        assert set(engines[0].runners[-1].adapters) == {0, 1, 2}
        engines[0].die()
        await eventually(lambda: live(engines[1]) == 4)
        engines[1].die()  # now only the front has "b"
        assert group.adapters.served().keys() == {"a", "b"}
        pace(engines[0], 0.0)
        engines[0].restart()
        await check(reading, asked)


async def test_late_fronts_and_engines_learn_all_adapters(folders):
    a, b, c = folders
    engines = [Engine(lora=(f"a={a}",), max_loras=3), Engine(lora=(f"a={a}",), max_loras=3)]
    engines[1].die()
    async with Group(*engines) as group:
        await group.adapters.load("b", b)
        await group.adapters.unload("a")
        engines[1].restart()
        await eventually(lambda: len(healthy(group)) == 2)
        late = link_to(*engines)
        await late.start()
        await eventually(lambda: late.adapters.served().keys() == {"b"} and len(healthy(late)) == 2)
        await late.adapters.load("a", c)
        await eventually(lambda: group.adapters.served().keys() == {"a", "b"})
        asked = [with_adapter(group, "a", i) for i in range(4)]
        await check(asyncio.gather(*(read(group, req) for req in asked)), asked)
        late.close()


async def test_runners_lost_while_loading_an_adapter(folders):
    engine = Engine(max_loras=1)
    async with Group(engine) as group:
        first, begun = engine.load_adapter, threading.Event()

        def fail_once(*place):
            if not begun.is_set():
                begun.set()
                raise RunnersLost("Rank 0 is gone.")
            first(*place)

        engine.loop._adapters._load_onto = fail_once
        await group.adapters.load("a", folders[0])
        assert engine.loop.num_rebuilds == 1
        await check(asyncio.gather(read(group, req := with_adapter(group, "a"))), [req])
        await group.adapters.unload("a")

        def fail(*place):
            raise RunnersLost("Rank 0 is gone.")

        engine.loop._adapters._load_onto = fail
        with pytest.raises(CallboardError, match="lost 3 times"):
            await group.adapters.load("a", folders[0])
        assert (await read(group, request(0)))[:2] == sequential(request(0), 512)


async def test_changed_files_end_only_their_own_requests(folders):
    engine = Engine(delay_s=0.1, max_loras=2)
    async with Group(engine) as group:
        await group.adapters.load("a", folders[0])
        await group.adapters.load("b", folders[1])
        asked = [with_adapter(group, "a", max_tokens=100), with_adapter(group, "b", 1, max_tokens=100)]
        reading = asyncio.gather(*(read(group, req) for req in asked))
        await eventually(lambda: engine.loop.stats()["running"] == 2 and engine.loop.core.scheduler.stats.steps > 2)
        save_adapter(Path(folders[1]), MODULES, 7)
        engine.delay_s, engine.runners[-1].dead = 0.0, "Rank 0 is gone."
        good, bad = await asyncio.wait_for(reading, 60)
        assert good[:2] == sequential(asked[0], 512)
        assert "have changed" in bad[2].error
        assert live(engine) == 0


async def test_new_runners_load_what_was_read_from_a_bucket(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("CALLBOARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(CLOUD_PACKAGES, "memory", "fsspec")
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    bucket = MemoryFileSystem()
    bucket.put(f"{folders[0]}/*", "/bucket/sql/")
    engine = Engine(lora=("a=memory://bucket/sql",), max_loras=2)
    async with Group(engine) as group:
        old = with_adapter(group, "a")
        await check(asyncio.gather(read(group, old)), [old])
        bucket.put(f"{folders[1]}/*", "/bucket/sql/")
        engine.runners[-1].dead = "Rank 0 is gone."
        again = with_adapter(group, "a", 1)
        await check(asyncio.gather(read(group, again)), [again])
        assert again.adapter == old.adapter
        await group.adapters.load("b", "memory://bucket/sql")
        assert with_adapter(group, "b").adapter != old.adapter


async def test_least_recently_used_adapter_makes_room_everywhere(folders):
    a, b, c = folders
    engines = [Engine(delay_s=0.002, max_loras=2) for _ in range(2)]
    async with Group(*engines) as group:
        other = link_to(*engines)
        await other.start()
        await eventually(lambda: len(healthy(other)) == 2)

        async def replaceable():
            return group.adapters.served().keys()

        async def load(front, name, path):
            await front.adapters.load(name, path, replaceable)

        await load(group, "a", a)
        await load(group, "b", b)
        await eventually(lambda: other.adapters.served().keys() == {"a", "b"})
        asked = [replace(with_adapter(other, "a", i), request_id=f"r{i}") for i in range(4)]  # another front uses it
        await check(asyncio.gather(*(read(other, req) for req in asked)), asked)
        await load(group, "c", c)
        assert group.adapters.served().keys() == {"a", "c"}

        for engine in engines:
            pace(engine, 0.1)
        asked = [with_adapter(group, "c", max_tokens=80)]
        reading = asyncio.gather(read(group, asked[0]))
        await eventually(lambda: sum(map(live, engines)) == 1)
        other.adapters.expect(with_adapter(other, "a").adapter)
        with pytest.raises(EngineRefusal, match="Requests use all adapters that are loaded, so 'b' has no place"):
            await load(other, "b", b)
        await load(group, "b", b)  # only the other front expects a request for it
        assert group.adapters.served().keys() == {"b", "c"}
        for engine in engines:
            pace(engine, 0.0)
        await check(reading, asked)
        other.close()
