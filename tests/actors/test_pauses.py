"""Pauses end with their callers until they begin, and with a resume or their lease afterwards."""

import asyncio
import threading
from types import SimpleNamespace

import msgspec
import pytest

from actors.engine.sleep import Lease
from actors.wire.engine_client import WeightsRefused
from actors.wire.link_messages import checked, encode
from actors.wire.weight_calls import (
    Connect,
    Discard,
    Disconnect,
    Finish,
    GetState,
    Pause,
    Receive,
    Resume,
    Start,
    WeightCall,
)
from runtime.base.types import CallboardError
from tests.support.engine.fake_runner import sequential
from tests.support.engine.groups import Group, healthy, link_closing, live
from tests.support.engine.links import Engine, eventually, hurry, link_to, only_link, read, request


def engines(count=1, **more):
    return [Engine(delay_s=0.02, weight_updates=True, **more) for _ in range(count)]


def pauses(engine):
    return engine.loop.weights.pauses


def started(engine, count=3):
    return eventually(lambda: engine.loop.core.scheduler.stats.steps >= count)


def mode_of(group, mode, **more):
    return group.weights(Pause(mode=mode, **more))


async def is_served(group, number=9):
    """A new request is answered."""
    found = await asyncio.wait_for(read(group, request(number, max_tokens=3)), 30)
    assert found[:2] == sequential(request(number, max_tokens=3), 512)


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
async def test_a_sleeping_engine_pauses_at_once(mode):
    async with Group(*engines()) as group:
        await group.sleep(1)
        await asyncio.wait_for(mode_of(group, mode), 30)
        await group.weights(Resume())
        await group.sleep(0)
        assert not (await group.weights(GetState()))["0"].paused
        await is_served(group)


async def test_a_sleeping_engine_refuses_what_needs_it_awake():
    (engine,) = engines()
    async with Group(engine) as group:
        reading = asyncio.create_task(read(group, request(0)))
        await started(engine)
        await group.weights(Start())
        await group.sleep(1)
        for call in (Pause(mode="wait"), Start(), Receive(["new"]), Finish(), Connect({})):
            with pytest.raises(WeightsRefused, match="sleep") as refusal:
                await asyncio.wait_for(group.weights(call), 30)
            assert refusal.value.code == "busy"
        await group.sleep(0)
        await group.weights(Finish())
        hurry(engine)
        assert len((await reading)[0]) == 40


async def test_sleep_ends_a_pause_that_waits_for_requests():
    (engine,) = engines()
    async with Group(engine) as group:
        reading = asyncio.create_task(read(group, request(0)))
        await started(engine)
        pausing = asyncio.create_task(mode_of(group, "wait"))
        await eventually(lambda: engine.loop.requests.holds_new)
        await group.sleep(1)
        with pytest.raises(WeightsRefused, match="sleep"):
            await asyncio.wait_for(pausing, 30)
        await group.sleep(0)
        hurry(engine)
        assert (await reading)[:2] == sequential(request(0), 512)
        await is_served(group)


async def test_a_resume_ends_a_pause_that_waits():
    (engine,) = engines()
    async with Group(engine) as group:
        reading = asyncio.create_task(read(group, request(0)))
        await started(engine)
        pausing = asyncio.create_task(mode_of(group, "wait"))
        await eventually(lambda: engine.loop.requests.holds_new)
        late = asyncio.create_task(read(group, request(1)))
        await group.weights(Resume())
        with pytest.raises(WeightsRefused, match="resumed"):
            await pausing
        hurry(engine)
        for number, stream in ((0, reading), (1, late)):
            assert (await stream)[:2] == sequential(request(number), 512)


@pytest.mark.parametrize("leaves", ["call", "front"])
async def test_a_pause_whose_caller_is_gone_never_begins(leaves):
    (engine,) = engines()
    async with Group(engine) as group, link_closing(link_to(engine)) as other:
        await other.start()
        await eventually(lambda: healthy(other))
        reading = asyncio.create_task(read(group, request(0)))
        await started(engine)
        pausing = asyncio.create_task(mode_of(other, "wait"))
        await eventually(lambda: engine.loop.requests.holds_new)
        late = asyncio.create_task(read(group, request(1)))
        if leaves == "call":
            pausing.cancel()
        else:
            other.close()
        await eventually(lambda: not engine.loop.requests.holds_new)
        hurry(engine)
        for number, stream in ((0, reading), (1, late)):
            assert (await stream)[:2] == sequential(request(number), 512)
        assert pauses(engine).current is None
        assert not group.is_paused
        pausing.cancel()


async def test_a_front_that_dies_with_its_streams_leaves_no_pause():
    """Its streams end at once, and with them the wait of its pause."""
    (engine,) = engines()
    async with Group(engine) as group, link_closing(link_to(engine)) as other:
        await other.start()
        await eventually(lambda: healthy(other))
        reading = asyncio.create_task(read(other, request(0)))
        await started(engine)
        pausing = asyncio.create_task(mode_of(other, "wait"))
        await eventually(lambda: engine.loop.requests.holds_new)
        other.close()
        await eventually(lambda: not live(engine))
        await is_served(group)
        reading.cancel()
        pausing.cancel()


async def test_a_sleep_of_a_dead_front_is_dropped():
    (engine,) = engines()
    async with Group(engine) as group, link_closing(link_to(engine)) as other:
        await other.start()
        await eventually(lambda: healthy(other))
        blocked = threading.Event()
        engine.loop._call(lambda: blocked.wait(30))
        asleep = asyncio.create_task(other.sleep(1))
        await eventually(lambda: only_link(other)._pending)
        other.close()
        await eventually(lambda: engine.loop._inbox.qsize() >= 2)  # the call, and the end of its connection
        blocked.set()
        await is_served(group)
        assert engine.loop.stats()["sleep_level"] == 0
        asleep.cancel()


async def test_an_update_takes_the_kv_of_its_own_pause(monkeypatch):
    (engine,) = engines()
    async with Group(engine) as group:
        kept, use = [], engine.loop.core.scheduler.use_weights

        def use_weights(info, keeps_kv):
            kept.append(keeps_kv)
            use(info, keeps_kv)

        monkeypatch.setattr(engine.loop.core.scheduler, "use_weights", use_weights)

        async def update():
            await group.weights(Start())
            await group.weights(Finish())

        await mode_of(group, "keep", kv="keep")
        await update()
        await group.weights(Resume())
        await update()
        reading = asyncio.create_task(read(group, request(0, max_tokens=400)))
        await started(engine)
        await mode_of(group, "keep")
        with pytest.raises(WeightsRefused, match="cannot end"):
            await mode_of(group, "wait", kv="keep")
        await update()
        assert kept == [True, False, False]
        reading.cancel()


async def test_a_pause_ends_with_its_lease():
    (engine,) = engines()
    async with Group(engine) as group:
        await mode_of(group, "keep", lease_s=0.2)
        await is_served(group)
        await eventually(lambda: not group.is_paused)
    (engine,) = engines(trainer_timeout_s=0.2)
    async with Group(engine) as group:
        await mode_of(group, "keep")
        await is_served(group)


async def test_an_open_update_holds_the_pause():
    (engine,) = engines()
    async with Group(engine) as group:
        await group.weights(Start())
        await mode_of(group, "keep", lease_s=0.05)
        lease = pauses(engine)._lease
        first = lease._timer
        await eventually(lambda: lease._timer is not first)  # it has looked once
        assert group.is_paused
        await group.weights(Discard())
        await eventually(lambda: not group.is_paused)


def test_a_lease_ends_only_without_renewals(monkeypatch):
    now, ended = [100.0], []
    monkeypatch.setattr("actors.engine.sleep.time", SimpleNamespace(monotonic=lambda: now[0]))
    lease = Lease(10.0, lambda work: None, lambda: ended.append(now[0]), lambda: False)
    for now[0] in (105.0, 111.0, 120.0):
        lease.renew()
        lease._timer.cancel()
        lease._look()
    now[0] = 129.0
    lease._look()
    assert not ended
    now[0] = 130.0
    lease._look()
    assert ended == [130.0]
    lease.end()
    lease._look()
    assert ended == [130.0]


async def test_calls_about_weights_renew_a_pause_but_monitors_do_not():
    (engine,) = engines()
    async with Group(engine) as group:
        await mode_of(group, "keep", lease_s=100.0)
        lease = pauses(engine)._lease
        for call, renews in ((GetState(), False), (Start(), True), (Discard(), True), (Disconnect(), True)):
            lease._ends_at = 0.0
            if not isinstance(call, Disconnect):
                await group.weights(call)
            else:
                engine.loop.weights.call(call)
                await eventually(lambda: lease._ends_at)
            assert bool(lease._ends_at) is renews, call


async def test_a_pause_is_all_or_nothing():
    pair = engines(2)
    async with Group(*pair) as group:
        reading = asyncio.create_task(read(group, request(0, max_tokens=300)))
        await eventually(lambda: any(map(live, pair)))
        busy = next(engine for engine in pair if live(engine))
        other = next(engine for engine in pair if engine is not busy)
        await started(busy)
        link = next(k for k in healthy(group) if k.engine == str(pair.index(busy)))
        await link.pause_for(checked(Pause(mode="keep")))
        with pytest.raises(WeightsRefused, match="cannot end"):
            await mode_of(group, "wait")
        await eventually(lambda: pauses(other).current is None and not other.loop.requests.holds_new)
        assert pauses(busy).current.mode == "keep"  # by its own call
        reading.cancel()


async def test_a_refused_pause_leaves_the_one_before():
    (engine,) = engines()
    async with Group(engine) as group:
        await mode_of(group, "keep")
        first = pauses(engine).current
        link = healthy(group)[0]
        second = checked(Pause(mode="keep", kv="keep"))
        await link.pause_for(second)
        link.cancel_pause(second.pause_id)
        await eventually(lambda: pauses(engine).current is first)


async def test_an_engine_that_starts_in_a_pause_joins_it():
    pair = engines(2)
    pair[1].die()
    async with Group(*pair) as group:
        await mode_of(group, "keep", lease_s=500.0)
        pair[1].restart()
        await eventually(lambda: len(healthy(group)) == 2 and pauses(pair[1]).current is not None)
        assert pauses(pair[1]).current.lease_s == 500.0
        assert {a.paused for a in (await group.weights(GetState())).values()} == {True}
        await group.weights(Resume())
        await eventually(lambda: not group.is_paused)
        stale = checked(Pause(mode="keep", joins=True))
        await next(iter(healthy(group))).pause_for(stale)  # of a front that has not seen the resume
        assert not any(pauses(engine).current for engine in pair)
        await is_served(group)


async def test_an_engine_that_was_lost_at_a_resume_returns_resumed(tmp_path):
    pair = [*engines(pause_file=tmp_path / "a"), *engines(pause_file=tmp_path / "b")]
    async with Group(*pair) as group:
        await mode_of(group, "keep")
        pair[1].die()
        await eventually(lambda: len(healthy(group)) == 1)
        await group.weights(Resume())
        pair[1].restart()
        await eventually(lambda: len(healthy(group)) == 2 and not group.is_paused)
        assert not (tmp_path / "b").exists()
        await is_served(group)


@pytest.mark.parametrize("content", [b"", b"\xff\x00", encode(Pause(lease_s=7.0, mode="keep"))])
async def test_a_stored_pause_goes_on_with_its_lease(tmp_path, content):
    (file := tmp_path / "paused-0").write_bytes(content)
    (engine,) = engines(pause_file=file)
    async with Group(engine) as group:
        assert group.is_paused
        assert pauses(engine)._lease.seconds == (7.0 if len(content) > 2 else 3600.0)
        await group.weights(Resume())
        assert not file.exists()


@pytest.mark.parametrize(
    "call",
    [WeightCall(), Receive(), Connect(None), Pause(mode="never"), Pause(lease_s=-1), Pause(lease_s=float("inf"))],
)
async def test_a_wrong_call_is_answered(call):
    (engine,) = engines()
    async with Group(engine) as group:
        if isinstance(call, Receive):
            await group.weights(Start())
        answer = engine.loop.weights.call(call)
        with pytest.raises(CallboardError, match=r"\w"):
            await asyncio.wait_for(asyncio.wrap_future(answer), 30)
        if isinstance(call, Pause):
            with pytest.raises(WeightsRefused):
                await asyncio.wait_for(group.weights(call), 30)
        await is_served(group)


async def test_a_cancelled_answer_does_not_end_the_step_thread():
    (engine,) = engines()
    async with Group(engine) as group:
        blocked = threading.Event()
        engine.loop._call(lambda: blocked.wait(30))
        answers = [engine.loop.weights.call(Pause(mode="keep")), engine.loop.drain("the engine goes")]
        assert all(answer.cancel() for answer in answers)
        blocked.set()
        await is_served(group)
        assert engine.loop.health() is None


async def test_tensors_are_parsed_beside_the_steps(monkeypatch):
    (engine,) = engines()
    threads = []

    def parts_of_json(info):
        threads.append(threading.current_thread().name)
        return ["new"]

    monkeypatch.setattr("actors.engine.weights.parts_of_json", parts_of_json)
    async with Group(engine) as group:
        await group.weights(Start())
        await group.weights(Receive(update_info={"paths": ["a"]}))
        await group.weights(Finish())
    assert len(threads) == 1
    assert threads[0] != "engine-step"


def test_a_message_that_cannot_be_encoded_is_not_repeated():
    from actors.wire.link_messages import SharedPrompts, Submit, decode_from_front

    sender, receiver = SharedPrompts(), SharedPrompts()
    good = request(0)
    bad = request(1)
    bad.token_ids[0] = object()
    for first, second in ((bad, bad), (bad, good)):
        sender.reduced(message := Submit(1, first, False))
        with pytest.raises(TypeError):
            encode(message)
        reduced = sender.reduced(Submit(2, second, False))
        if second is good:
            assert receiver.restored(decode_from_front(encode(reduced))).request == good
    assert msgspec.structs.asdict(Pause())["mode"] == "abort"
