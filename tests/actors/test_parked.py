"""Requests that wait at a front for an engine or its weights have limits, deadlines, figures and shares."""

import asyncio
from dataclasses import replace
from itertools import chain

import pytest

from actors.wire.engine_client import EngineRefusal, Refusal
from actors.wire.metrics import MetricValues
from actors.wire.weight_calls import Finish, Start
from runtime.policy.queue_sizes import exceeds_share
from tests.support.engine.groups import Group, live
from tests.support.engine.links import Engine, eventually, read, request


def late(i, owner="", version="999"):
    prefix = f"{owner}/" if owner else ""
    return replace(request(i, max_tokens=2), request_id=f"{prefix}cmpl-{i}-0", min_weight_version=version)


async def refusals(tasks):
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, EngineRefusal) for error in found), found
    return [error.reason for error in found], found[0]


@pytest.mark.parametrize("limits", [{"queue_timeout_s": 0.3}, {"trainer_timeout_s": 0.3}])
async def test_requests_for_weights_have_limits_and_a_deadline(limits):
    engine = Engine(weight_updates=True, max_queued_requests=4, **limits)
    async with Group(engine) as group:
        found, first = await refusals([read(group, late(i)) for i in range(300)])
        assert (found.count(Refusal.LATE), found.count(Refusal.BUSY)) == (4, 296)
        assert next(iter(limits)) in str(first)
        assert "'999'" in str(first)
        assert not len(group._waiting)
        assert (await read(group, request(9, max_tokens=2)))[1]


async def test_tokens_that_wait_for_weights_have_a_limit():
    size = len(request(0).token_ids)
    engine = Engine(weight_updates=True, max_queued_tokens=3 * size, queue_timeout_s=0.2)
    async with Group(engine) as group:
        found, _ = await refusals([read(group, late(i)) for i in range(5)])
        assert sorted(found) == [Refusal.BUSY] * 2 + [Refusal.LATE] * 3


async def test_a_deadline_counts_from_the_arrival():
    """Status messages, which assign parked streams again, neither extend it nor lose their places."""
    engine = Engine(weight_updates=True, max_queued_requests=1, queue_timeout_s=0.5)
    async with Group(engine) as group:
        waiting = asyncio.create_task(read(group, late(0)))
        await eventually(lambda: len(group._waiting) == 1)
        timer = group._waiting._streams[next(iter(group._waiting))][1]
        for _ in range(3):
            engine.loop._call(engine.loop._send_status_to_all).result()
        await asyncio.sleep(0.05)
        assert group._waiting._streams[next(iter(group._waiting))][1] is timer
        assert (await refusals([waiting]))[0] == [Refusal.LATE]
        assert not len(group._waiting)


async def test_the_deadline_ends_with_the_wait():
    engine = Engine(weight_updates=True, queue_timeout_s=100.0)
    async with Group(engine) as group:
        waiting = asyncio.create_task(read(group, late(0, version="1")))
        await eventually(lambda: len(group._waiting) == 1)
        timer = group._waiting._streams[next(iter(group._waiting))][1]
        await group.weights(Start())
        await group.weights(Finish())
        assert (await asyncio.wait_for(waiting, 30))[1]
        assert timer.cancelled()


async def test_one_key_leaves_places_to_others():
    engine = Engine(weight_updates=True, max_queued_requests=16)
    async with Group(engine) as group:
        tasks = {}
        for owner, count in (("a", 40), ("b", 40), ("c", 1)):
            tasks[owner] = [asyncio.create_task(read(group, late(i, owner))) for i in range(count)]
            await eventually(lambda mine=tasks[owner]: all(t.done() or t in mine for t in mine) and len(group._waiting))
            await asyncio.sleep(0.05)
        waiting = {owner: sum(not task.done() for task in mine) for owner, mine in tasks.items()}
        assert waiting == {"a": 12, "b": 3, "c": 1}
        with pytest.raises(EngineRefusal, match="its share of 16") as refusal:
            await tasks["a"][-1]
        assert refusal.value.reason is Refusal.BUSY
        for task in chain(*tasks.values()):
            task.cancel()


async def test_one_key_leaves_places_in_an_engines_queue():
    engine = Engine(max_num_seqs=1, max_queued_requests=16, delay_s=0.05)
    async with Group(engine) as group:
        tasks = []

        def ask(owner, i):
            asked = replace(request(i, max_tokens=400), request_id=f"{owner}/cmpl-{i}-0")
            tasks.append(asyncio.create_task(read(group, asked)))
            return tasks[-1]

        running = ask("a", 0)
        await eventually(lambda: engine.loop.stats()["running"] == 1)
        of_a = [ask("a", i) for i in range(1, 30)]
        await eventually(lambda: sum(task.done() for task in of_a) == 17)
        assert live(engine) == 13
        ask("b", 50)
        await eventually(lambda: live(engine) == 14)
        with pytest.raises(EngineRefusal, match="Your API key has 12"):
            await next(task for task in of_a if task.done())
        assert not running.done()
        for task in tasks:
            task.cancel()


def test_a_share_leaves_a_place_for_every_owner():
    held = dict.fromkeys("abcdef", 0)
    for owner in held:
        while not exceeds_share(held[owner], sum(held.values()), 1024):
            held[owner] += 1
    assert all(held[owner] for owner in "abcde")
    assert sum(held.values()) <= 1024
    assert held["a"] == 768


async def test_waits_are_counted():
    engine = Engine(weight_updates=True, queue_timeout_s=0.3)
    async with Group(engine) as group:
        waiting = asyncio.create_task(read(group, late(0)))
        await eventually(lambda: len(group._waiting) == 1)

        async def figures():
            (snapshot,) = (await group.report({"0": MetricValues()})).values()
            waits = snapshot.figures.numbers["callboard:engine_waits"][""]
            return waits, sum(snapshot.figures.histograms["callboard:engine_wait_seconds"].counts)

        assert await figures() == (1, 0)
        await refusals([waiting])
        assert await figures() == (1, 1)
