"""Engines that die, freeze, drain, fill up, start and stop behind one EngineGroup, over real sockets."""

import asyncio
import socket
import threading
import time

import pytest
import uvloop

from actors.front import link as link_module
from actors.wire.engine_client import EngineRefusal, Refusal
from actors.wire.link_messages import HEARTBEAT_S, LOST_AFTER_BEATS, Heartbeat
from actors.wire.transport import Address
from runtime.base.types import FinishReason, Request, SamplingParams
from tests.support.engine.fake_runner import sequential
from tests.support.engine.groups import Group, check, healthy, info_with, link_closing, live, running
from tests.support.engine.links import INFO, Engine, eventually, hurry, link_to, read, request

SLOW_S = 0.05  # of a step: streams of 60 tokens take three seconds, unless `hurry` ends them


def freeze(engine):
    """As after SIGSTOP: its connections stay open and it sends nothing."""
    for connection in list(engine.loop._connections):
        connection.send = lambda message: None


@pytest.fixture
def fast_beats(monkeypatch):
    monkeypatch.setattr(link_module, "HEARTBEAT_S", 0.05)


async def test_streams_spread_over_the_engines():
    engines = [Engine(delay_s=SLOW_S), Engine(delay_s=SLOW_S)]
    async with Group(*engines) as group:
        reading = asyncio.gather(*(read(group, request(i)) for i in range(10)))
        await eventually(lambda: all(running(e) == 5 for e in engines))
        hurry(*engines)
        await check(reading, 10, 40)
        assert group.engines() == ["0", "1"]


async def test_streams_of_a_dead_engine_move_at_once():
    engines = [Engine(delay_s=SLOW_S), Engine(delay_s=SLOW_S)]
    async with Group(*engines) as group:
        reading = asyncio.gather(*(read(group, request(i, max_tokens=60)) for i in range(8)))
        await eventually(lambda: engines[0].loop.core.scheduler.stats.steps > 3)
        engines[0].die()
        await eventually(lambda: live(engines[1]) == 8)
        assert group.health() is None
        hurry(*engines)
        await check(reading, 8, 60)
        await eventually(lambda: list(group.links) == ["app/engine/1#1"])
        assert group.engines() == ["1"]


async def test_streams_leave_an_engine_that_reloads_its_model():
    engines = [Engine(delay_s=SLOW_S), Engine(delay_s=SLOW_S)]
    start, is_loaded = engines[0].start, threading.Event()
    async with Group(*engines) as group:
        reading = asyncio.gather(*(read(group, request(i, max_tokens=60)) for i in range(8)))
        await eventually(lambda: all(e.loop.core.scheduler.stats.steps > 3 for e in engines))
        engines[0].start = lambda: is_loaded.wait(60) and start()
        engines[0].runners[-1].dead = "Rank 0 is gone."
        await eventually(lambda: live(engines[1]) == 8)
        assert group.health() is None
        hurry(*engines)
        await check(reading, 8, 60)
        is_loaded.set()
        await eventually(lambda: len(healthy(group)) == 2)
        await eventually(lambda: not live(engines[0]))


@pytest.mark.usefixtures("fast_beats")
async def test_streams_leave_a_frozen_engine_until_it_thaws():
    engines = [Engine(delay_s=SLOW_S), Engine(delay_s=SLOW_S)]
    async with Group(*engines) as group:
        reading = asyncio.gather(*(read(group, request(i, max_tokens=60)) for i in range(8)))
        await eventually(lambda: all(e.loop.core.scheduler.stats.steps > 3 for e in engines))
        connections = engines[0].loop._connections.copy()
        open_link, engines[0].open_link = engines[0].open_link, asyncio.Event().wait
        freeze(engines[0])
        await eventually(lambda: live(engines[1]) == 8)
        assert group.health() is None
        assert len(healthy(group)) == 1
        hurry(*engines)
        await eventually(lambda: not connections & engines[0].loop._connections)  # it aborts moved streams
        assert not engines[0].loop.core.scheduler.requests
        await check(reading, 8, 60)
        engines[0].open_link = open_link
        for link in group.links.values():
            if not link.usable:
                link._task.cancel()  # it would wait for the old attempt's end
                link._task = asyncio.create_task(link._keep_connected())
        await eventually(lambda: len(healthy(group)) == 2)


@pytest.mark.usefixtures("fast_beats")
async def test_a_group_is_unhealthy_if_its_only_engine_is_frozen():
    engine = Engine()
    async with Group(engine) as group:
        engine.open_link = asyncio.Event().wait
        freeze(engine)
        await eventually(lambda: group.health() == "The engine is restarting.")


@pytest.mark.usefixtures("fast_beats")
def test_a_replica_that_was_late_itself_loses_no_engine():
    """On uvloop, as Serve's replicas run: after a pause it calls due timers before it reads."""

    async def main():
        engine, num_pauses = Engine(), 3
        async with Group(engine) as group:
            (link,) = healthy(group)
            connection, send = link._connection, link._send

            def send_and_pause(message):
                nonlocal num_pauses
                send(message)
                if isinstance(message, Heartbeat) and num_pauses:
                    num_pauses -= 1
                    asyncio.get_running_loop().call_soon(time.sleep, 0.3)

            link._send = send_and_pause
            await eventually(lambda: not num_pauses)
            assert (await read(group, request(0)))[:2] == sequential(request(0), 512)
            assert link._connection is connection

    uvloop.run(main())


@pytest.mark.usefixtures("fast_beats")
async def test_an_engine_that_accepts_no_request_is_unhealthy():
    """The kernel accepts connections for any listener, so only the engine's own message shows that it is ready."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0callboard-test-nobody")
    listener.listen()
    engines = [Engine(), Engine()]

    async def nowhere():
        return Address("\0callboard-test-nobody", b"x" * 32), INFO

    open_link, engines[0].open_link = engines[0].open_link, nowhere
    group = link_to(*engines)
    await group.start()
    try:
        await asyncio.sleep(0.1)
        assert [link.engine for link in healthy(group)] == ["1"]
        for i in range(4):
            assert (await read(group, request(i)))[:2] == sequential(request(i), 512)
        engines[0].open_link = open_link
        await eventually(lambda: len(healthy(group)) == 2)
    finally:
        group.close()
        listener.close()
        for engine in engines:
            engine.loop.close()


async def test_streams_leave_a_draining_engine(monkeypatch):
    monkeypatch.setattr("actors.front.engine_group._SETTLED_S", 0.05)
    engines = [Engine(delay_s=SLOW_S), Engine(delay_s=SLOW_S)]
    async with Group(*engines) as group:
        reading = asyncio.gather(*(read(group, request(i, max_tokens=60)) for i in range(8)))
        await eventually(lambda: engines[0].loop.core.scheduler.stats.steps > 3)
        await asyncio.wrap_future(engines[0].loop.drain("It ends."))
        await eventually(lambda: not engines[0].loop.core.scheduler.requests)
        await eventually(lambda: live(engines[1]) == 8)
        assert group.health() is None
        hurry(*engines)
        assert (await read(group, request(3)))[:2] == sequential(request(3), 512)
        await check(reading, 8, 60)


async def test_streams_stay_when_all_engines_drain(monkeypatch):
    """At the end of the whole server, streams of the first engine may not pile up on the last."""
    monkeypatch.setattr("actors.front.engine_group._SETTLED_S", 0.1)
    engines = [Engine(delay_s=SLOW_S), Engine(delay_s=SLOW_S)]
    async with Group(*engines) as group:
        reading = asyncio.gather(*(read(group, request(i, max_tokens=60)) for i in range(8)))
        await eventually(lambda: all(running(e) == 4 for e in engines))
        for engine in engines:
            await asyncio.wrap_future(engine.loop.drain("The server ends."))
        await eventually(lambda: group.health() == "The server ends.")
        with pytest.raises(EngineRefusal, match="The server ends") as refused:
            await read(group, request(9))
        assert refused.value.reason is Refusal.DRAINING
        await asyncio.sleep(0.15)
        assert [running(e) for e in engines] == [4, 4]
        hurry(*engines)
        await check(reading, 8, 60)


async def test_streams_wait_for_a_new_kind_while_the_old_one_runs(monkeypatch):
    """Streams of a draining engine: another dtype would change the rest of the answer."""
    monkeypatch.setattr("actors.front.engine_group._SETTLED_S", 0.02)
    engine, other = Engine(delay_s=0.005), Engine(info=info_with(fingerprint="other"))
    async with Group(engine) as group:
        reading = asyncio.create_task(read(group, request(0, max_tokens=100)))
        first = group.links["app/engine/0#1"]
        await eventually(lambda: first.num_streams == 1 and first.streams[0].received)
        group._directory.all.append(other)
        await eventually(lambda: len(healthy(group)) == 2)
        await asyncio.wrap_future(engine.loop.drain("It ends."))
        assert (await reading)[:2] == sequential(request(0, max_tokens=100), 512)
        assert other.loop.core.scheduler.stats.steps == 0
        other.loop.close()


async def test_a_full_engine_is_skipped(monkeypatch):
    """Others fill the first engine. This replica has not sent a stream there and tries it first."""
    engines = [Engine(delay_s=0.02, max_num_seqs=1, max_queued_requests=1) for _ in range(2)]
    async with Group(engines[0]) as others, link_closing(link_to(*engines)) as group:
        await group.start()
        await eventually(lambda: len(healthy(group)) == 2)
        filling = await fill(others, engines[0])
        assert (await read(group, request(2)))[:2] == sequential(request(2), 512)
        assert running(engines[0]) == 1
        filling += await fill(group, engines[1])
        with pytest.raises(EngineRefusal, match="max_queued_requests") as refused:
            await read(group, request(5))
        assert refused.value.reason is Refusal.BUSY
        for task in filling:
            task.cancel()
        engines[1].loop.close()


async def fill(group, engine):
    """One running request and one waiting request."""
    tasks = []
    for place in ("running", "waiting"):
        tasks.append(asyncio.create_task(read(group, request(0, max_tokens=400))))
        await eventually(lambda place=place: engine.loop.stats()[place] == 1)
    return tasks


async def test_a_prompt_too_long_for_one_engine_goes_to_another():
    engines = [Engine(info=info_with(max_model_len=64)), Engine()]
    long = Request("long", [1 + i % 9 for i in range(100)], 100, SamplingParams(max_tokens=20, ignore_eos=True))
    async with Group(*engines) as group:
        assert group.info.max_model_len == 512
        assert (await read(group, long))[:2] == sequential(long, 512)
        engines[1].die()
        await eventually(lambda: group.engines() == ["0"])
        with pytest.raises(EngineRefusal, match="maximum context length is 64") as refused:
            await read(group, long)
        assert refused.value.reason is Refusal.NEVER


async def test_only_accepted_streams_skip_the_next_queue():
    engine = Engine(delay_s=0.01, max_num_seqs=1, max_queued_requests=2)
    async with Group(engine) as group:
        (link,) = group.links.values()
        old = [asyncio.create_task(read(group, request(0, max_tokens=30)))]
        await eventually(lambda: running(engine) == 1)
        old += [asyncio.create_task(read(group, request(i, max_tokens=30))) for i in (1, 2)]
        await eventually(lambda: len(link.streams) == 3 and all(s.accepted for s in link.streams))
        engine.die()
        await eventually(lambda: group.health() is not None)
        new = [asyncio.create_task(read(group, request(i, max_tokens=30))) for i in range(3, 7)]
        await asyncio.sleep(0)
        engine.restart()
        for i, task in enumerate(old):
            assert (await task)[:2] == sequential(request(i, max_tokens=30), 512)
        refused = [r for r in await asyncio.gather(*new, return_exceptions=True) if isinstance(r, EngineRefusal)]
        assert [r.reason for r in refused] == [Refusal.BUSY] * 4


async def test_a_stream_that_kills_engines_is_given_up():
    """It kills streams that were computed beside it, but not streams that only waited."""
    engine = Engine(delay_s=0.005, max_num_seqs=1)
    async with Group(engine) as group:
        poison = asyncio.create_task(read(group, request(0, max_tokens=400)))
        await eventually(lambda: running(engine) == 1)
        innocent = asyncio.create_task(read(group, request(1)))
        for _ in range(3):
            await eventually(lambda: any(s.in_queue for link in group.links.values() for s in link.streams))
            engine.die()
            await eventually(lambda: not group.engines())
            await eventually(lambda: not group.links)  # the directory reports it dead
            engine.restart()
        tokens, reason, last = await asyncio.wait_for(poison, 60)
        assert reason is FinishReason.ERROR
        assert "3 engines" in last.error
        assert tokens == sequential(request(0, max_tokens=400), 512)[0][: len(tokens)]
        assert (await innocent)[:2] == sequential(request(1), 512)
        assert group.num_streams == 0


async def test_few_broken_connections_end_no_stream():
    engine = Engine(delay_s=SLOW_S)
    async with Group(engine) as group:
        reading = asyncio.create_task(read(group, request(0, max_tokens=80)))
        for _ in range(5):
            await eventually(lambda: running(engine) == 1)
            (link,) = group.links.values()
            broken = link._connection
            broken.transport.abort()
            await eventually(lambda link=link, broken=broken: link.usable and link._connection is not broken)
        hurry(engine)
        assert (await reading)[:2] == sequential(request(0, max_tokens=80), 512)


async def test_an_abort_by_id_follows_a_moved_stream():
    engines = [Engine(delay_s=0.01), Engine(delay_s=0.01)]
    async with Group(*engines) as group:
        moved = asyncio.create_task(read(group, request(0, max_tokens=400)))
        await eventually(lambda: any(map(running, engines)))
        first, second = sorted(engines, key=running, reverse=True)
        first.die()
        await eventually(lambda: running(second) == 1)
        group.abort("r0")
        assert (await moved)[1] is FinishReason.ABORT
        waiting = asyncio.create_task(read(group, request(1, max_tokens=400)))
        left = asyncio.create_task(read(group, request(2, max_tokens=400)))
        await eventually(lambda: live(second) == 2)
        second.die()
        await eventually(lambda: len(group._waiting) == 2)
        group.abort("r1")
        assert (await waiting)[1] is FinishReason.ABORT
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert group.num_streams == 0


@pytest.mark.usefixtures("fast_beats")
async def test_an_engine_is_lost_after_missed_heartbeats():
    """A partition is noticed within 1.5 s. In the worst case it begins just after an answer."""
    assert (LOST_AFTER_BEATS + 1) * HEARTBEAT_S <= 1.5
    engine, num_beats = Engine(), 0
    async with Group(engine) as group:
        (link,) = healthy(group)
        send, engine.open_link = link._send, asyncio.Event().wait

        def count(message):
            nonlocal num_beats
            num_beats += isinstance(message, Heartbeat)
            send(message)

        freeze(engine)
        link._send = count
        await eventually(lambda: not link.connected)
        assert LOST_AFTER_BEATS - 1 <= num_beats <= LOST_AFTER_BEATS + 1


async def test_an_engine_reports_that_it_is_ready():
    """A front sends one request, and the reply arrives when the model is loaded."""
    engine, ready, num_asked = Engine(), asyncio.Event(), 0
    open_link = engine.open_link

    async def open_link_when_ready():
        nonlocal num_asked
        num_asked += 1
        await ready.wait()
        return await open_link()

    engine.open_link = open_link_when_ready
    async with link_closing(link_to(engine)) as group:
        starting = asyncio.create_task(group.start())
        await asyncio.sleep(0.3)
        assert group.health() == "The engine is starting."
        ready.set()
        await asyncio.wait_for(starting, 1.0)
        assert num_asked == 1
    engine.loop.close()


@pytest.mark.parametrize("is_silent", [True, False])
async def test_a_group_works_without_its_directory(monkeypatch, is_silent: bool):
    """Streams, new requests and broken links. The group learns of changes when the directory is back."""
    monkeypatch.setattr("actors.front.engine_group._RETRY_S", 0.05)
    engines = [Engine(delay_s=0.002), Engine(delay_s=0.002)]
    async with Group(*engines) as group:
        directory, is_back = group._directory, asyncio.Event()
        changed = directory.changed

        async def away(known):
            if is_silent:
                await is_back.wait()
            if not is_back.is_set():
                raise OSError("no GCS")
            return await changed(known)

        monkeypatch.setattr(directory, "changed", away)
        group._following.cancel()
        group._following = asyncio.create_task(group._follow_directory())
        reading = asyncio.create_task(read(group, request(0, max_tokens=80)))
        await eventually(lambda: group.num_streams == 1)
        for link in healthy(group):
            link._connection.transport.abort()
        assert (await reading)[:2] == sequential(request(0, max_tokens=80), 512)
        await eventually(lambda: len(healthy(group)) == 2)
        engines[1].die()
        directory.all.append(Engine())
        assert (await read(group, request(1)))[:2] == sequential(request(1), 512)
        is_back.set()
        await eventually(lambda: group.engines() == ["0", "2"] and len(group.links) == 2)
        directory.all[2].loop.close()
