"""A step is planned shortly before the last one ends, in an engine loop over real sockets: who arrives is in it."""

import asyncio
import queue
import random
import time
from types import SimpleNamespace

import pytest

from actors.engine_loop import EngineLoop
from runtime.core.config import EngineConfig
from runtime.core.types import Request, SamplingParams
from tests.actors.test_link import INFO, Engine, SlowRunner, link_to, read, request

STEP_S = 0.08


class PipelinedRunner(SlowRunner):
    """A step begins when it is submitted or the one before it ends, as on a device."""

    def __init__(self):
        super().__init__(EngineConfig(block_size=4, max_num_seqs=16), INFO)
        self.ends, self.step_s = [0.0], STEP_S

    def submit(self, plan):
        self.ends.append(max(self.ends[-1], time.monotonic()) + self.step_s)
        super().submit(plan)

    def has_result(self):
        return bool(self.queue) and self.ends[-len(self.queue)] <= time.monotonic()

    def collect(self):
        self.closed.wait(max(0.0, self.ends[-len(self.queue)] - time.monotonic()))
        return super().collect()


async def steps_to_first_token(late: bool) -> float:
    """Mean of requests that arrive at any time while another one decodes."""
    engine, rng = Engine(start=PipelinedRunner, late_planning=late), random.Random(0)
    link = link_to(engine)
    await link.start()
    await read(link, request(0, max_tokens=3))  # it learns what steps take
    stream = asyncio.create_task(read(link, request(1, max_tokens=400)))
    took = []
    for i in range(2, 16):
        await asyncio.sleep(rng.uniform(2, 4) * STEP_S)
        start = time.monotonic()
        await read(link, request(i, max_tokens=1))
        took.append((time.monotonic() - start) / STEP_S)
    assert not stream.done()
    stream.cancel()
    link.close()
    engine.loop.close()
    return sum(took) / len(took)


async def test_who_arrives_during_a_step_is_in_the_next_one():
    late, early = await asyncio.gather(steps_to_first_token(True), steps_to_first_token(False))
    assert late < early - 0.5


async def steps_beside_a_first_step(late: bool) -> float:
    """Until the first token of who arrives while an idle engine's first step runs; the least of three."""
    engine = Engine(start=PipelinedRunner, late_planning=late, prefix_cache=False)
    link = link_to(engine)
    await link.start()

    async def ask(name: str, max_tokens: int) -> None:
        await read(link, Request(name, [1, 2] * 50, 100, SamplingParams(max_tokens=max_tokens, ignore_eos=True)))

    for i in range(3):  # it learns what steps take
        await ask(f"first{i}", 3)
    took = []
    for i in range(3):
        other = asyncio.create_task(ask(f"other{i}", 4))
        await asyncio.sleep(0.3 * STEP_S)
        start = time.monotonic()
        await ask(f"own{i}", 1)
        took.append((time.monotonic() - start) / STEP_S)
        await other
    link.close()
    engine.loop.close()
    return min(took)


async def test_who_arrives_during_an_idle_engines_first_step_is_in_the_second():
    late, early = await asyncio.gather(steps_beside_a_first_step(True), steps_beside_a_first_step(False))
    assert late < early - 0.5


async def test_steps_that_become_shorter_do_not_leave_the_runners_idle():
    """What a step takes is learned from when its result is taken, which must not be when it was expected."""
    engine = Engine(start=PipelinedRunner)
    link = link_to(engine)
    await link.start()
    await read(link, request(0, max_tokens=8))  # it learns that steps are long
    engine.runners[-1].step_s = STEP_S / 10
    start = time.monotonic()
    await read(link, request(1, max_tokens=10))
    assert time.monotonic() - start < 4 * STEP_S  # 6 if each is awaited for nine tenths of the last one
    link.close()
    engine.loop.close()


@pytest.mark.parametrize(
    ("delays", "waits"), [([0.0002, 0.0], [0.0002]), ([0.02, 0.003, 0.0], [0.005, 0.001]), ([-0.1], [])]
)
def test_a_look_whether_a_step_has_ended_makes_no_plan_late(delays, waits):
    found = []

    def get(timeout: float):
        found.append(timeout)
        raise queue.Empty

    loop = SimpleNamespace(
        core=SimpleNamespace(scheduler=SimpleNamespace(planning_delay_s=iter(delays).__next__)),
        executor=SimpleNamespace(has_result=lambda: False),
        _inbox=SimpleNamespace(get=get),
        _emit=lambda: None,
        _take_message=None,
        _closed=False,
    )
    assert EngineLoop._wait_to_plan(loop)
    assert found == waits
