"""Updates of weights while streams run: one version a token, on every engine, through every death."""

import asyncio
import threading
from dataclasses import replace

import pytest

from actors.runners.step_channel import RunnersLost
from actors.wire.engine_client import EngineRefusal, WeightsRefused
from actors.wire.weight_calls import Discard, Finish, GetState, Pause, Receive, Rename, Resume, Start
from runtime.base.types import CallboardError, FinishReason
from tests.support.engine.fake_runner import of_versions
from tests.support.engine.groups import Group, healthy, live
from tests.support.engine.links import Engine, eventually, hurry, read, request


def engines(count=1, **more):
    return [Engine(delay_s=0.02, weight_updates=True, **more) for _ in range(count)]


async def update(group, *parts, **more):
    await group.weights(Start())
    await group.weights(Receive(list(parts) or ["new"]))
    return await group.weights(Finish(**more))


async def is_right(reading, asked):
    """Each stream has all its tokens, and each token is what its version gives. Returns the versions of each."""
    spans = []
    for (tokens, reason, last), req in zip(await asyncio.wait_for(reading, 60), asked, strict=True):
        assert (len(tokens), reason) == (req.params.max_tokens, FinishReason.LENGTH)
        assert tokens == of_versions(req, tokens, last.weight_versions)
        spans.append([name for _, name in last.weight_versions])
    return spans


def started(engine, count=3):
    return eventually(lambda: engine.loop.core.scheduler.stats.steps >= count)


async def test_an_update_changes_streams_between_two_tokens():
    (engine,) = engines()
    async with Group(engine) as group:
        asked = [request(i, max_tokens=30) for i in range(4)]
        reading = asyncio.gather(*(read(group, req) for req in asked))
        await started(engine)
        (answer,) = (await update(group)).values()
        assert (answer.version, answer.serial, answer.updating) == ("1", 1, False)
        hurry(engine)
        assert await is_right(reading, asked) == [["default", "1"]] * 4
        await eventually(lambda: engine.store)


async def test_names_of_versions_reach_streams():
    (engine,) = engines()
    async with Group(engine) as group:
        await update(group, weight_version="7", wait_stored=True)
        _, _, last = await read(group, request(0, max_tokens=2))
        assert list(last.weight_versions) == [(0, "7")]
        await group.weights(Rename(new_version="eight"))
        await eventually(lambda: group.info.weights.name == "eight")
        _, _, last = await read(group, request(1, max_tokens=2))
        assert list(last.weight_versions) == [(0, "eight")]
        assert (await group.weights(GetState()))["0"].stored


async def test_a_pause_keeps_requests_until_resume():
    (engine,) = engines()
    async with Group(engine) as group:
        asked = [request(i, max_tokens=20) for i in range(3)]
        reading = asyncio.gather(*(read(group, req) for req in asked[:2]))
        await started(engine)
        await group.weights(Pause(mode="keep"))
        steps = engine.loop.core.scheduler.stats.steps
        late = asyncio.gather(read(group, asked[2]))
        await eventually(lambda: live(engine) == 3)
        await update(group)
        assert engine.loop.core.scheduler.stats.steps == steps
        assert (await group.weights(GetState()))["0"].paused
        assert not reading.done()
        hurry(engine)
        await group.weights(Resume())
        assert await is_right(reading, asked[:2]) == [["default", "1"]] * 2
        assert await is_right(late, asked[2:]) == [["1"]]


async def test_a_pause_that_waits_lets_live_requests_end():
    (engine,) = engines()
    async with Group(engine) as group:
        asked = [request(i, max_tokens=12) for i in range(2)]
        reading = asyncio.gather(read(group, asked[0]))
        await started(engine)
        pausing = asyncio.create_task(group.weights(Pause(mode="wait")))
        await eventually(lambda: engine.loop.requests.holds_new)
        late = asyncio.gather(read(group, asked[1]))
        await pausing
        await is_right(reading, asked[:1])
        assert (live(engine), len(engine.loop.requests.held)) == (0, 1)
        await group.weights(Resume())
        await is_right(late, asked[1:])


async def test_a_paused_engine_refuses_to_wait_for_requests():
    (engine,) = engines()
    async with Group(engine) as group:
        reading = asyncio.gather(read(group, asked := request(0, max_tokens=12)))
        await started(engine)
        await group.weights(Pause(mode="keep"))
        with pytest.raises(WeightsRefused, match="resume") as refusal:
            await group.weights(Pause(mode="wait"))
        assert refusal.value.code == "busy"
        await group.weights(Resume())
        await is_right(reading, [asked])


async def test_a_pause_that_keeps_requests_ends_a_wait_for_them():
    (engine,) = engines()
    async with Group(engine) as group:
        reading = asyncio.gather(read(group, asked := request(0, max_tokens=12)))
        await started(engine)
        waiting = asyncio.create_task(group.weights(Pause(mode="wait")))
        await eventually(lambda: engine.loop.requests.holds_new)
        await group.weights(Pause(mode="keep"))
        with pytest.raises(WeightsRefused, match="paused before") as refusal:
            await waiting
        assert refusal.value.code == "busy"
        await group.weights(Resume())
        await is_right(reading, [asked])


async def test_a_pause_that_aborts_ends_live_requests():
    (engine,) = engines()
    async with Group(engine) as group:
        reading = asyncio.create_task(read(group, request(0, max_tokens=30)))
        await started(engine)
        await group.weights(Pause(mode="abort"))
        tokens, reason, last = await reading
        assert (reason, last.error) == (FinishReason.ABORT, "A pause of the server ended this request; send it again.")
        assert 0 < len(tokens) < 30
        await group.weights(Resume())
        await read(group, request(1, max_tokens=2))


async def test_calls_out_of_order_are_refused():
    (engine,) = engines()
    async with Group(engine) as group:
        for call in (Receive([]), Finish()):
            with pytest.raises(WeightsRefused, match="No update") as refusal:
                await group.weights(call)
            assert refusal.value.code == "not_open"
        await group.weights(Start())
        with pytest.raises(WeightsRefused, match="Another update") as refusal:
            await group.weights(Start())
        assert refusal.value.code == "busy"
        await group.weights(Finish())  # a refused start does not drop the open update


async def test_a_bad_part_leaves_the_old_version():
    pair = engines(2)
    async with Group(*pair) as group:
        with pytest.raises(CallboardError, match="has shape"):
            await update(group, "bad")
        for engine in pair:
            await eventually(lambda e=engine: e.runners[-1].staged == [])
            assert "weights_apply" not in engine.runners[-1].calls
        assert {a.serial for a in (await group.weights(GetState())).values()} == {0}
        await update(group)  # the next one is not blocked
        assert {a.serial for a in (await group.weights(GetState())).values()} == {1}


async def test_an_engine_without_updates_refuses_all_calls():
    engine = Engine()
    async with Group(engine) as group:
        with pytest.raises(WeightsRefused, match="--weight-updates"):
            await group.weights(Pause())
        with pytest.raises(EngineRefusal, match="never change"):
            await read(group, replace(request(0), min_weight_version="1"))
        assert (await read(group, request(0, max_tokens=1)))[2].weight_versions == []


async def test_requests_wait_for_their_version():
    pair = engines(2)
    async with Group(*pair) as group:
        waiting = asyncio.create_task(read(group, replace(request(0, max_tokens=3), min_weight_version="2")))
        await update(group)
        await read(group, replace(request(1, max_tokens=3), min_weight_version="1"))
        assert not waiting.done()
        await update(group)
        tokens, _, last = await asyncio.wait_for(waiting, 60)
        assert (len(tokens), list(last.weight_versions)) == (3, [(0, "2")])


async def test_new_requests_prefer_the_newest_version():
    pair = engines(2)
    async with Group(*pair) as group:
        newer = sorted(group.links)[1]
        for call in (Start(), Receive(["new"]), Finish()):
            await group._directory.weights(newer, call)
        await eventually(lambda: group.links[newer].info.weights.serial == 1)
        for i in range(6):
            assert list((await read(group, request(i, max_tokens=1)))[2].weight_versions) == [(0, "1")]


@pytest.mark.parametrize("method", ["weights_receive", "weights_check", "weights_apply", "weights_store"])
async def test_runners_may_die_in_every_phase(method):
    (engine,) = engines()
    async with Group(engine) as group:
        await update(group, wait_stored=True)
        asked = [request(i, max_tokens=30) for i in range(4)]
        reading = asyncio.gather(*(read(group, req) for req in asked))
        await started(engine)
        first = engine.runners[-1]

        def die(*_):
            first.dead = "Rank 0 is gone."
            raise RunnersLost(first.dead)

        setattr(first, method, die)
        if method == "weights_store":
            await update(group)
        else:
            with pytest.raises(CallboardError, match="Rank 0 is gone"):
                await update(group)
        await eventually(lambda: len(engine.runners) == 2 and engine.loop.reason is None)
        await update(group, weight_version="9")
        hurry(engine)
        for versions in await is_right(reading, asked):
            assert versions[-1] == "9"
            assert versions[0] == "1"


async def test_an_unexpected_error_of_apply_restarts_the_runners():
    (engine,) = engines()
    async with Group(engine) as group:
        engine.runners[-1].refuses["weights_apply"] = CallboardError("Tensor y is on another device.")
        with pytest.raises(CallboardError, match="another device"):
            await update(group)
        await eventually(lambda: len(engine.runners) == 2 and engine.loop.reason is None)
        assert (await group.weights(GetState()))["0"].serial == 0


async def test_an_engine_that_dies_returns_with_the_stored_version():
    (engine,) = engines()
    async with Group(engine) as group:
        await update(group, weight_version="3", wait_stored=True)
        asked = [request(i, max_tokens=30) for i in range(3)]
        reading = asyncio.gather(*(read(group, req) for req in asked))
        await started(engine)
        await group.weights(Start())
        engine.die()
        await eventually(lambda: not healthy(group))
        engine.restart()
        await eventually(lambda: len(healthy(group)) == 1)
        with pytest.raises(WeightsRefused, match="No update"):
            await group.weights(Finish())
        hurry(engine)
        assert await is_right(reading, asked) == [["3"]] * 3


@pytest.mark.parametrize("mode", ["keep", "wait"])
async def test_an_engine_that_dies_in_a_pause_returns_paused(mode, tmp_path):
    (engine,) = engines(pause_file=tmp_path / "store" / "paused-0")
    async with Group(engine) as group:
        asked = [request(i, max_tokens=30) for i in range(3)]
        reading = asyncio.gather(*(read(group, req) for req in asked))
        if mode == "wait":
            hurry(engine)
            await is_right(reading, asked)
        await started(engine)
        await group.weights(Pause(mode=mode))
        if mode == "wait":
            reading = asyncio.gather(*(read(group, req) for req in asked))
        engine.die()
        await eventually(lambda: not healthy(group))
        engine.restart()
        await eventually(lambda: len(healthy(group)) == 1 and live(engine) == 3)
        assert (await group.weights(GetState()))["0"].paused
        hurry(engine)
        assert engine.loop.core.scheduler.stats.steps == 0
        assert not reading.done()
        await group.weights(Resume())
        await is_right(reading, asked)
        engine.die()
        engine.restart()
        await eventually(lambda: len(healthy(group)) == 1)
        assert not (await group.weights(GetState()))["0"].paused


async def test_a_pause_that_cannot_be_written_is_a_pause(tmp_path, caplog):
    (tmp_path / "file").touch()
    (engine,) = engines(pause_file=tmp_path / "file" / "paused-0")
    async with Group(engine) as group:
        await group.weights(Pause(mode="keep"))
        assert (await group.weights(GetState()))["0"].paused
        assert "would not stay paused" in caplog.text
        await group.weights(Resume())
        assert not (await group.weights(GetState()))["0"].paused


async def test_an_engine_that_dies_in_an_update_fails_it_everywhere():
    pair = engines(2)
    async with Group(*pair) as group:
        pair[1].runners[-1].blocks["weights_receive"] = threading.Event()
        updating = asyncio.create_task(update(group))
        await eventually(lambda: "weights_receive" in pair[1].runners[-1].calls)
        pair[1].die()
        pair[1].runners[-1].blocks["weights_receive"].set()
        with pytest.raises(CallboardError):
            await updating
        await eventually(lambda: len(healthy(group)) == 1)
        await eventually(lambda: pair[0].runners[-1].staged == [])
        (answer,) = (await group.weights(GetState())).values()
        assert (answer.serial, answer.updating) == (0, False)
        await update(group)


async def test_a_discard_ends_a_part_that_blocks():
    (engine,) = engines()
    async with Group(engine) as group:
        runner = engine.runners[-1]
        blocked = runner.blocks["weights_receive"] = threading.Event()
        runner.weights_discard = blocked.set
        await group.weights(Start())
        receiving = asyncio.create_task(group.weights(Receive(["new"])))
        await eventually(lambda: "weights_receive" in runner.calls)
        with pytest.raises(WeightsRefused, match="has not ended"):
            await group.weights(Receive(["other"]))
        await group.weights(Discard())
        with pytest.raises(CallboardError, match="dropped"):
            await receiving


async def test_prefixes_of_several_engines_follow_the_version():
    pair = engines(2)
    async with Group(*pair) as group:
        prompt = [1, 2] * 20

        async def ask(name):
            req = replace(request(0, max_tokens=2), request_id=name, token_ids=prompt, prompt_len=len(prompt))
            return (await read(group, req))[2]

        await ask("a")
        await update(group)
        await ask("b")
        hits = []

        async def is_expected():
            req = replace(request(0, max_tokens=1), request_id=f"c{len(hits)}", token_ids=prompt, prompt_len=40)
            async for output in group.generate(req):
                hits.append((output.num_cached, output.num_expected))
            return hits[-1][0] > 0

        for _ in range(100):
            if await is_expected():
                break
            await asyncio.sleep(0.02)
        assert hits[-1] == (36, 36)
