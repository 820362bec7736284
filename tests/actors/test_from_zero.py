"""A group of engines that may have none: requests wait and request one, within their limits."""

import asyncio
import sys

import pytest

from actors.engine.actor import EngineActor
from actors.front.engine_group import EngineGroup, ScaleFromZero
from actors.wire.engine_client import EngineRefusal, Refusal
from actors.wire.link_messages import WaitLimits
from runtime.base.config import EngineConfig
from runtime.base.types import TOKEN_BYTES, CallboardError
from tests.support.engine.fake_runner import sequential
from tests.support.engine.links import Engine, Engines, eventually, read, request


class Zero:
    """An engine that starts on request, and the group that requests it."""

    def __init__(self, max_requests=100, timeout_s=None, max_tokens=1000, max_bytes=1 << 20):
        self.engine, self.num_asked, self.may_start = Engine(delay_s=0.005), 0, asyncio.Event()
        self.may_start.set()
        self.error = None
        self.engine.die()
        limits = WaitLimits(max_requests, max_tokens, max_bytes, timeout_s)
        self.group = EngineGroup(Engines(self.engine), ScaleFromZero(self.wake, limits))

    async def wake(self):
        self.num_asked += 1
        if self.error is not None:
            raise self.error
        await self.may_start.wait()
        if self.engine.loop is None:
            self.engine.restart()

    async def leave(self):
        """As in scale-in: running streams end or move."""
        await asyncio.wrap_future(self.engine.loop.drain("the engine goes"))
        await eventually(lambda: all(link.draining for link in self.group.links.values()))

    async def __aenter__(self):
        await self.group.start()
        return self

    async def __aexit__(self, *_):
        self.group.close()
        if self.engine.loop is not None:
            self.engine.loop.close()


async def test_a_start_from_zero_requests_an_engine_for_model_facts():
    async with Zero() as zero:
        assert zero.num_asked
        assert zero.group.info.vocab_size
        assert (await read(zero.group, request(0)))[:2] == sequential(request(0), 512)


async def test_waiting_requests_request_one_engine_once():
    async with Zero() as zero:
        zero.engine.die()
        await eventually(lambda: not zero.group.engines())
        assert zero.group.health() is None
        zero.may_start.clear()
        num_asked = zero.num_asked
        reading = asyncio.gather(*(read(zero.group, request(i)) for i in range(8)))
        await eventually(lambda: len(zero.group._waiting) == 8)
        await eventually(lambda: zero.num_asked > num_asked)
        await asyncio.sleep(0.1)
        assert zero.num_asked == num_asked + 1
        assert zero.group.health() is None
        zero.may_start.set()
        for i, (tokens, reason, _) in enumerate(await reading):
            assert (tokens, reason) == sequential(request(i), 512)


async def test_a_request_to_a_leaving_engine_waits_for_the_next():
    async with Zero() as zero:
        running = asyncio.create_task(read(zero.group, request(0, max_tokens=100)))
        await eventually(lambda: zero.engine.loop.stats()["running"] == 1)
        zero.may_start.clear()
        await zero.leave()
        assert zero.group.health() is None
        new = asyncio.create_task(read(zero.group, request(1)))
        await eventually(lambda: len(zero.group._waiting) == 1)
        assert (await running)[:2] == sequential(request(0, max_tokens=100), 512)
        zero.engine.die()
        zero.may_start.set()
        assert (await new)[:2] == sequential(request(1), 512)


async def test_a_stream_of_a_stopped_engine_goes_on_with_the_next():
    async with Zero() as zero:
        reading = asyncio.create_task(read(zero.group, request(0, max_tokens=150)))
        await eventually(lambda: zero.engine.loop.core.scheduler.stats.steps > 10)
        await zero.leave()
        zero.engine.die()
        assert (await reading)[:2] == sequential(request(0, max_tokens=150), 512)


async def test_a_stopping_server_refuses_only_unstarted_requests():
    """This holds too before the engine for both has started."""
    async with Zero() as zero:
        begun = asyncio.create_task(read(zero.group, request(0, max_tokens=100)))
        await eventually(lambda: zero.engine.loop.core.scheduler.stats.steps > 10)
        zero.may_start.clear()
        zero.engine.die()
        new = asyncio.create_task(read(zero.group, request(1)))
        await eventually(lambda: len(zero.group._waiting) == 2)
        assert zero.group.drain("the server ends") == 1
        for refused in (new, read(zero.group, request(2))):
            with pytest.raises(EngineRefusal, match="the server ends"):
                await refused
        assert zero.group.health() == "the server ends"
        zero.may_start.set()
        assert (await begun)[:2] == sequential(request(0, max_tokens=100), 512)
        assert zero.group.drain("the server ends") == 0


async def test_waiting_for_an_engine_has_limits():
    async with Zero(max_requests=2, timeout_s=0.2) as zero:
        zero.engine.die()
        await eventually(lambda: not zero.group.engines())
        zero.may_start.clear()
        found = await asyncio.gather(*(read(zero.group, request(i)) for i in range(3)), return_exceptions=True)
        assert [error.reason for error in found] == [Refusal.LATE, Refusal.LATE, Refusal.BUSY]
        assert zero.group.num_streams == 0


@pytest.mark.parametrize("limit", ["max_tokens", "max_bytes"])
async def test_prompts_that_wait_for_an_engine_have_a_limit(limit):
    size = len(request(0).token_ids) * (1 if limit == "max_tokens" else TOKEN_BYTES)
    async with Zero(**{limit: 2 * size}, timeout_s=0.2) as zero:
        zero.engine.die()
        await eventually(lambda: not zero.group.engines())
        zero.may_start.clear()
        found = await asyncio.gather(*(read(zero.group, request(i)) for i in [0, 0, 0]), return_exceptions=True)
        assert [error.reason for error in found] == [Refusal.LATE, Refusal.LATE, Refusal.BUSY]
        assert limit.replace("max_", "max_queued_") in str(found[2])


async def test_requests_fail_when_no_engine_can_be_started():
    async with Zero() as zero:
        zero.engine.die()
        await eventually(lambda: not zero.group.engines())
        zero.error = CallboardError("No engine could be started.")
        with pytest.raises(CallboardError, match="could be started"):
            await read(zero.group, request(0))


async def test_a_loading_engine_drains_at_once():
    """A server may end while it starts another engine; the streams of the others still have their time."""
    interval = sys.getswitchinterval()
    engine = EngineActor(EngineConfig(), None, False, 0, "app", 1)
    sys.setswitchinterval(interval)
    await engine.drain("the server ends")
    assert await engine.num_live() == 0


async def test_an_engine_reports_its_load():
    engine = Engine(delay_s=0.01, max_num_seqs=2)
    group = EngineGroup(Engines(engine))
    await group.start()
    try:
        idle = engine.loop.figures()
        assert (idle.num_live, idle.queued_tokens, idle.num_used_blocks, idle.max_rows) == (0, 0, 0, 2)
        reading = asyncio.gather(*(read(group, request(i)) for i in range(3)))
        await eventually(lambda: engine.loop.stats()["running"] == 2 and engine.loop.figures().num_live == 3)
        busy = engine.loop.figures()
        assert busy.num_used_blocks > 0
        assert (busy.num_live, busy.queued_tokens, busy.idle_s) == (3, 5, 0)
        await reading
        await eventually(lambda: engine.loop.figures().idle_s > 0)
        assert engine.loop.figures().num_blocks == busy.num_blocks > 0
    finally:
        group.close()
        engine.loop.close()
