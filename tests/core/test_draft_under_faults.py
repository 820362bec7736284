"""The rate of an engine with a draft that runs beside it and is sometimes late, slow or silent, or stops reading.

Time is simulated: a target with an 8B model's step times, and a draft in its own process. The
draft is right in four of five tokens. Rates are relative to the target's tokens a second without a draft."""

import random
from collections import deque

import numpy as np
import pytest

from runtime.assembly.engine import build_engine
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import Request, SamplingParams
from runtime.speculation.choose_k import Speculation, StepTimes
from runtime.speculation.draft import LocalWire
from runtime.speculation.draft_client import DraftClient
from tests.support.engine.fake_runner import EOS, VOCAB, FakeRunner
from tests.support.engine.whole import whole_draft

STEP_US = ((1, 3650.0), (2, 3900.0), (4, 3950.0), (8, 4000.0), (16, 4100.0), (32, 4350.0), (64, 4800.0), (128, 5370.0))
VERIFY = StepTimes((*STEP_US, (2048, 60_000.0)))
CONTEXT, WIRE_S, LOOP_S, REPLACED_S = 1024, 60e-6, 100e-6, 3.0


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Target(FakeRunner):
    """Steps one after another; each takes its time."""

    def __init__(self, config, info, clock):
        super().__init__(config, info)
        self.clock, self.done = clock, deque()

    def submit(self, plan):
        start = max(self.clock.now, self.done[-1] if self.done else 0.0)
        self.done.append(start + WIRE_S + VERIFY.us(int(plan.num_tokens.sum())) / 1e6)
        super().submit(plan)

    def collect(self):
        self.clock.now = max(self.clock.now, self.done.popleft())
        return super().collect()


class DraftRunner(FakeRunner):
    """Samples something else in a share of its tokens; keeps the sizes of its plans, as tokens and steps."""

    def __init__(self, config, info, share_wrong):
        super().__init__(config, info)
        self.rng, self.share_wrong, self.sizes = np.random.default_rng(0), share_wrong, deque()

    def sample(self, state):
        return (super().sample(state) + (self.rng.random() < self.share_wrong)) % VOCAB

    def submit(self, plan):
        self.sizes.append((int(plan.num_tokens.sum()), plan.num_steps))
        super().submit(plan)


class Wire(LocalWire):
    """A draft that runs while the engine looks at it. Its steps take `plan_s(now, tokens, steps)`. While `hangs(now)`
    it does nothing, and a share of the frames is lost."""

    def __init__(self, core, clock, plan_s, hangs, loss, rng):
        super().__init__(core)
        self.clock, self.plan_s, self.hangs, self.loss, self.rng = clock, plan_s, hangs, loss, rng
        self.free_at, self.told, self.chains = clock.now, deque(), deque()

    def send(self, told):
        if self.rng.random() >= self.loss:
            self.told.append((self.clock.now + WIRE_S, told))

    def receive(self, timeout_s):
        at, until = self.clock.now, self.clock.now + max(0.0, timeout_s)
        while True:
            self.live(at)
            if (came := bool(self.chains) and self.chains[0][0] <= at) or at >= until:
                break
            at = min(until, self.chains[0][0] if self.chains else until, at + 50e-6)
        self.clock.now = at
        return self.chains.popleft()[1] if came else None

    def live(self, until):
        while self.free_at <= until:
            if self.hangs(self.free_at):
                self.free_at += 0.01
                continue
            while self.told and self.told[0][0] <= self.free_at:
                self._core.take(None, self.told.popleft()[1])
            if self._core.step():
                self.free_at += self.plan_s(self.free_at, *self._core.executor.sizes.popleft())
            else:
                self.free_at = max(
                    self.free_at + 1e-6, min(until + 1e-6, self.told[0][0] if self.told else until + 1e-6)
                )
            if (chains := self._core.outbox.pop(None, None)) is not None and self.rng.random() >= self.loss:
                self.chains.append((self.free_at + WIRE_S, chains))


def rate(
    num_rows=1, seconds=4.0, wrong=0.2, step_us=300.0, token_us=3.0, stalls=0.0, stall_s=0.02,
    slower=lambda now: 1.0, hangs=lambda now: False, loss=0.0, told_us=None, draft=True,
):  # fmt: skip
    """Tokens a second. The draft is expected to take `told_us` a step; a draft that hangs is replaced."""
    rng, clock = random.Random(0), Clock()
    config = EngineConfig(block_size=16, max_num_seqs=max(2, num_rows), max_num_batched_tokens=2048)
    info = ModelInfo("f", VOCAB, CONTEXT, (EOS,), 1 + config.max_num_seqs * (CONTEXT // 16 + 1), 16, "none", "none")
    client = DraftClient(VOCAB, clock)
    core = build_engine(
        config, info, Target(config, info, clock), Speculation(client, None, STEP_US, 1000.0, clock, 60.0)
    )

    def plan_s(now, tokens, steps):
        took_us = (step_us * steps + token_us * tokens) * max(0.5, rng.gauss(1.0, 0.05)) * slower(now)
        return took_us / 1e6 + (stall_s if rng.random() < stalls else 0.0)

    def attach():
        own = whole_draft(config, info, DraftRunner(config, info, wrong), ahead=4)
        times = tuple((rows, told_us or step_us + token_us * rows) for rows in (1, 8, 64))
        client.attach(Wire(own, clock, plan_s, hangs, loss, rng), times)

    def ask(number):
        prompt = [rng.randrange(1, VOCAB) for _ in range(rng.randint(20, 60))]
        params = SamplingParams(max_tokens=rng.randint(100, 400), ignore_eos=True)
        core.add(Request(str(number), prompt, len(prompt), params, seed=number))

    if draft:
        attach()
    num_asked, num_tokens, hung_at = num_rows, 0, None
    for number in range(num_rows):
        ask(number)
    while clock.now < seconds:
        output = core.step()
        clock.now += LOOP_S
        if output is not None:
            num_tokens += len(output.token_ids)
            for _ in output.finished:
                ask(num_asked)
                num_asked += 1
        hung_at = (clock.now if hung_at is None else hung_at) if client.is_hung else None
        if hung_at is not None and clock.now > hung_at + REPLACED_S:
            attach()
    return num_tokens / clock.now


def at_times(period, share):
    return lambda now: now % period < period * share


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("least", "scenario"),
    [
        (2.1, {}),
        (2.1, {"num_rows": 8}),
        (1.08, {"wrong": 0.6}),
        (1.5, {"step_us": 900.0}),
        (2.0, {"stalls": 0.005}),
        (1.9, {"stalls": 0.05, "stall_s": 0.005}),
        (1.3, {"slower": lambda now: 8.0 if at_times(2.0, 0.33)(now) else 1.0}),
        (1.9, {"slower": lambda now: 20.0 if at_times(0.3, 0.1)(now) else 1.0, "num_rows": 4}),
        (1.85, {"hangs": at_times(2.0, 0.2)}),
        (1.6, {"hangs": lambda now: 3.0 < now < 13.0, "seconds": 24.0}),
        (1.4, {"loss": 0.02}),
        (1.25, {"step_us": 900.0, "told_us": 100.0}),
        (0.99, {"step_us": 3000.0}),
        (0.99, {"step_us": 6000.0}),
    ],
)
def test_a_faulty_draft_is_used_while_it_helps(least, scenario):
    alone = rate(scenario.get("num_rows", 1), draft=False)
    assert rate(**scenario) > least * alone
