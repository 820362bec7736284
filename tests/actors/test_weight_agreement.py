"""Engines that were lost, or that a front did not reach, end an update like the others, or not at all."""

import asyncio
import threading

import pytest

from actors.engine import weights
from actors.wire.engine_client import WeightsRefused
from actors.wire.weight_calls import Check, Discard, Finish, GetState, Receive, Start
from tests.support.engine.groups import Group
from tests.support.engine.links import Engine, eventually


def engines(count=2):
    return [Engine(delay_s=0.02, weight_updates=True) for _ in range(count)]


async def ask(group, number, *calls):
    """Call one engine alone, as a front without a link to the other does."""
    for call in calls:
        answer = await group._directory.weights(sorted(group.links)[number], call)
    return answer


async def infos(group):
    return list((await group.weights(GetState())).values())


async def update(group, **more):
    await group.weights(Start())
    await group.weights(Receive(["new"]))
    return list((await group.weights(Finish(**more))).values())


OWN = Start("own"), Receive(["new"])


async def test_a_refused_start_opens_no_update():
    async with Group(*engines()) as group:
        await ask(group, 0, *OWN)
        with pytest.raises(WeightsRefused, match="open") as refusal:
            await group.weights(Start())
        assert refusal.value.code == "busy"
        assert [each.updating for each in await infos(group)] == [True, False]
        await ask(group, 0, Finish())  # the open update is still whole


async def test_a_part_that_an_engine_missed_fails_the_update():
    async with Group(*engines()) as group:
        await group.weights(Start())
        await group.weights(Receive(["new"]))
        await ask(group, 1, Receive(["more"]))
        with pytest.raises(WeightsRefused, match="other parts") as refusal:
            await group.weights(Finish())
        assert refusal.value.code == "not_open"
        assert [(each.serial, each.updating) for each in await infos(group)] == [(0, False)] * 2


async def test_updates_of_two_trainers_are_not_mixed():
    async with Group(*engines()) as group:
        for number, update_id in enumerate("ab"):
            await ask(group, number, Start(update_id), Receive(["new"]))
        with pytest.raises(WeightsRefused, match="begin another"):
            await group.weights(Finish())
        assert {each.serial for each in await infos(group)} == {0}


async def test_an_engine_that_missed_an_update_catches_up():
    async with Group(*engines()) as group:
        await ask(group, 1, *OWN, Finish())
        assert [(each.version, each.serial) for each in await infos(group)] == [("default", 0), ("1", 1)]
        assert {(each.version, each.serial) for each in await update(group)} == {("2", 2)}


async def test_partial_updates_need_equal_weights():
    pair = engines()
    async with Group(*pair) as group:
        await ask(group, 1, *OWN, Finish())
        for engine in pair:
            engine.runners[-1].weights_check = lambda: False
        with pytest.raises(WeightsRefused, match="all tensors"):
            await update(group)
        assert [each.updating for each in await infos(group)] == [False, False]
        for engine in pair:
            del engine.runners[-1].weights_check
        await update(group)
        for engine in pair:
            engine.runners[-1].weights_check = lambda: False
        assert {each.serial for each in await update(group)} == {3}


async def test_an_engine_drops_an_update_that_failed():
    """The front that made the call may be gone, and then it discards nothing."""
    async with Group(*engines(1)) as group:
        with pytest.raises(WeightsRefused, match="has shape"):
            await ask(group, 0, OWN[0], Receive(["bad"]), Check())
        assert [each.updating for each in await infos(group)] == [False]
        await update(group)


async def test_a_discard_ends_before_the_next_update_begins():
    (engine,) = engines(1)
    async with Group(engine) as group:
        blocked = engine.runners[-1].blocks["weights_discard"] = threading.Event()
        await ask(group, 0, *OWN)
        discarding = asyncio.create_task(group.weights(Discard()))
        await eventually(lambda: "weights_discard" in engine.runners[-1].calls)
        with pytest.raises(WeightsRefused, match="open"):
            await group.weights(Start())
        blocked.set()
        await discarding
        await update(group)


async def test_an_update_without_calls_ends_at_its_time_limit(monkeypatch):
    (engine,) = engines(1)
    async with Group(engine) as group:
        monkeypatch.setattr(weights, "_EXPIRES_S", 0.2)
        await ask(group, 0, *OWN)
        await eventually(lambda: engine.loop.weights._update is None)
        await eventually(lambda: engine.runners[-1].staged == [])
        monkeypatch.undo()
        assert {each.serial for each in await update(group)} == {1}
