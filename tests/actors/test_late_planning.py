"""The engine loop plans a step shortly before the last one ends, so that late requests are in it.

No test reads a clock: the pacing sets when the next step must be planned, and the runner when a step has ended."""

import asyncio
import contextlib
import queue
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from actors.engine.loop import EngineLoop
from actors.wire.link_messages import Submit
from runtime.base.config import EngineConfig
from runtime.core.plan import StepPlan
from tests.support.engine.fake_runner import FixedPacing, sequential
from tests.support.engine.links import INFO, Engine, SlowRunner, eventually, link_to, read, request
from tests.support.engine.whole import replace_extra

LOOK_S = 0.004  # the loop looks four times as often whether the step in flight has ended


class SteppedRunner(SlowRunner):
    """A runner that keeps its plans and ends its steps when the test requests it."""

    def __init__(self):
        super().__init__(EngineConfig(block_size=4, max_num_seqs=16), INFO)
        self.plans: list[StepPlan] = []
        self.may_end = threading.Semaphore(0)

    def submit(self, plan):
        self.plans.append(plan)
        super().submit(plan)

    def has_result(self):
        return self.may_end._value > 0

    def collect(self):
        self.may_end.acquire()
        return super().collect()

    def close(self):
        super().close()
        self.end_steps()

    def end_steps(self, count=1000):
        self.may_end.release(count)

    def step_of(self, prompt_number: int) -> int:
        """The step in which prompt `number` began, counted from 0."""
        steps = [plan.step_id for plan in self.plans for _ in plan.new]
        return steps[prompt_number] if prompt_number < len(steps) else 0


class Pacing(FixedPacing):
    """Steps need not be planned before `is_time`."""

    def __init__(self):
        super().__init__(None)
        self.is_time = False

    def planning_delay_s(self, step):
        return 0.0 if self.is_time else LOOK_S


@asynccontextmanager
async def serving(late: bool):
    engine = Engine(start=SteppedRunner, late_planning=late)
    replace_extra(engine.loop.core, pacing := Pacing())
    delivered, deliver = [], engine.loop.links._deliver
    engine.loop.links._deliver = lambda front, message: (deliver(front, message), delivered.append(message))
    link = link_to(engine)
    await link.start()
    try:
        yield engine.loop, engine.runners[-1], pacing, link, delivered
    finally:
        link.close()
        engine.runners[-1].end_steps()
        engine.loop.close()


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize(("late", "in_step"), [(True, 1), (False, 2)])
async def test_a_request_that_arrives_during_a_step_joins_the_next(late, in_step, num_steps):
    """The step is the first of an idle engine, or a later one."""
    async with serving(late) as (loop, runner, pacing, link, delivered):
        streams = [asyncio.create_task(read(link, request(0)))]
        for step in range(1, num_steps + 1):
            await eventually(lambda step=step: len(runner.plans) >= step)
            runner.end_steps(1)
            await eventually(lambda step=step: loop.core.scheduler.stats.steps == step)
        await eventually(lambda: len(runner.plans) == num_steps + (1 if late else 2))
        runs = runner.plans[num_steps].step_id  # its result has not arrived
        streams.append(asyncio.create_task(read(link, request(1))))
        await eventually(lambda: sum(isinstance(message, Submit) for message in delivered) == 2)
        await eventually(lambda: not late or len(loop.core.scheduler.requests) == 2)
        pacing.is_time = True
        runner.end_steps()
        answers = await asyncio.gather(*streams)
        assert runner.step_of(1) == runs + in_step
        assert [answer[:2] for answer in answers] == [sequential(request(i), 512) for i in range(2)]


async def test_a_step_that_ends_early_is_followed_at_once():
    """It was expected to run for a long time, so the loop must check if it has ended."""
    async with serving(late=True) as (_, runner, _, link, _):
        runner.end_steps()
        assert (await read(link, request(0)))[:2] == sequential(request(0), 512)


@pytest.mark.parametrize(
    ("delays", "waits"),
    [([0.0002, 0.0], [0.0002]), ([0.02, 0.003, 0.0], [0.005, 0.001]), ([60.0, 0.1, 0.0], [0.01, 0.01]), ([-0.1], [])],
)
def test_polling_for_the_end_of_a_step_delays_no_plan(delays, waits):
    found = []

    def get(timeout: float):
        found.append(timeout)
        raise queue.Empty

    loop = SimpleNamespace(
        core=SimpleNamespace(scheduler=SimpleNamespace(planning_delay_s=iter(delays).__next__)),
        executor=SimpleNamespace(has_result=lambda: False),
        _inbox=SimpleNamespace(get=get),
        _frames=SimpleNamespace(send=lambda: None),
        _take_message=None,
        _closed=False,
    )
    assert EngineLoop._wait_to_plan(loop)
    assert found == waits


def test_a_short_timeout_of_the_inbox_ends():
    """A message was taken without a wait before it. The next short wait on a SimpleQueue may then not end."""
    inbox = type((engine := Engine()).loop._inbox)()
    engine.loop.close()

    def wait():
        for _ in range(30_000):
            inbox.put(None)
            inbox.get()
            with contextlib.suppress(queue.Empty):
                inbox.get(timeout=1e-6)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive()
