"""The engine reports live requests without a step, and nothing that may take long."""

import asyncio
import threading
from contextlib import asynccontextmanager

import pytest

from actors.wire.weight_calls import Finish, Pause, Resume, Start
from runtime.policy.stall_watch import StallWatch
from tests.support.engine.groups import Group, live
from tests.support.engine.links import Engine, eventually, hurry, read, request


class Watched:
    """An engine that looks for stalls at times of the test's choice."""

    def __init__(self, group, engine):
        self.group, self.engine, self.loop, self.now = group, engine, engine.loop, 0.0
        self.loop._stalls = StallWatch(lambda: self.now)

    def stalls(self, *seconds):
        """Look once now and after each of these pauses; return the stalls that were counted."""
        self.loop.check_progress()
        for pause in seconds:
            self.now += pause
            self.loop.check_progress()
        return self.loop.meter.figures.numbers["callboard:stalls"][""]


@asynccontextmanager
async def watched(**more):
    engine = Engine(delay_s=0.02, weight_updates=True, **more)
    async with Group(engine) as group:
        reading = asyncio.create_task(read(group, request(0, max_tokens=60)))
        await eventually(lambda: engine.loop.core.scheduler.stats.steps >= 3)
        yield Watched(group, engine)
        hurry(engine)
        assert len((await asyncio.wait_for(reading, 60))[0]) == 60


async def test_a_stall_is_reported_once_with_stacks(caplog):
    async with watched() as it:
        for count in (1, 2):
            blocked, entered = threading.Event(), threading.Event()

            def something_that_blocks(blocked=blocked, entered=entered):
                entered.set()
                blocked.wait(60)

            it.loop._call(something_that_blocks)
            await asyncio.to_thread(entered.wait, 60)
            assert it.stalls(4.0) == count - 1
            assert it.stalls(1.0, 5.0, 60.0) == count
            steps = it.loop.core.scheduler.stats.steps
            blocked.set()
            await eventually(lambda steps=steps: it.loop.core.scheduler.stats.steps > steps)
            it.stalls()  # it has gone on
        assert caplog.text.count("no step for 5 s with 1 requests live") == 2
        assert caplog.text.count("something_that_blocks") >= 2
        assert "engine-step" in caplog.text
        report = it.loop.report(type(it.loop.meter.figures)())
        assert report.figures.numbers["callboard:stalls"][""] == 2


async def test_a_result_that_is_not_collected_is_a_stall(monkeypatch):
    async with watched() as it:
        blocked, entered = threading.Event(), threading.Event()

        def wait_to_plan():
            if not blocked.is_set():
                entered.set()
                blocked.wait(60)
            return True

        monkeypatch.setattr(it.loop, "_wait_to_plan", wait_to_plan)
        await asyncio.to_thread(entered.wait, 60)
        assert it.stalls(6.0) == 1
        blocked.set()


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_long_step_is_a_step(depth):
    async with watched(pipeline_depth=depth) as it:
        runner = it.engine.runners[-1]
        collect, entered = runner.collect, threading.Event()

        def long_step():
            entered.set()
            return collect()

        runner.hang, runner.collect = True, long_step  # until it is closed
        await asyncio.to_thread(entered.wait, 60)
        assert it.stalls(*[6.0] * 3) == 0
        it.engine.delay_s = 0.001
        runner.close()  # another group of runners computes the rest


@pytest.mark.parametrize("mode", ["keep", "sleep"])
async def test_requests_that_wait_are_no_stall(mode):
    async with watched() as it:
        await (it.group.sleep(1) if mode == "sleep" else it.group.weights(Pause(mode=mode)))
        assert live(it.engine) == 1
        assert it.stalls(*[6.0] * 3) == 0
        await (it.group.sleep(0) if mode == "sleep" else it.group.weights(Resume()))


async def test_a_change_of_weights_is_no_stall():
    async with watched() as it:
        blocked = it.engine.runners[-1].blocks["weights_apply"] = threading.Event()
        await it.group.weights(Start())
        finishing = asyncio.create_task(it.group.weights(Finish()))
        await eventually(lambda: "weights_apply" in it.engine.runners[-1].calls)
        assert it.stalls(*[6.0] * 3) == 0
        blocked.set()
        await finishing


async def test_an_idle_engine_is_no_stall():
    engine = Engine()
    async with Group(engine) as group:
        assert Watched(group, engine).stalls(*[6.0] * 3) == 0
