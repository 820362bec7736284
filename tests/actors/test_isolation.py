"""A request that kills its runners ends, and no other request does."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError, FinishReason, Request, SamplingParams
from runtime.core.plan import decode_plan
from runtime.policy.isolation import MAX_LOSSES, Isolation
from tests.support.engine import links
from tests.support.engine.fake_runner import EOS, VOCAB, CheckedCore, FakeRunner, sequential
from tests.support.engine.links import eventually, link_to, read, request

INFO = ModelInfo("f", VOCAB, 256, (EOS,), 400, 4, "none", "none")
POISON = 28  # a prompt that begins with it is one


class PoisonedRunner(FakeRunner):
    """Dies of rows of requests with prompts that begin with POISON, when it computes them or when it gets them. The
    rows are prompts, or decode rows at every `period`-th position."""

    def __init__(self, config, kills: str = "decode", period: int = 1, at_once: bool = False) -> None:
        super().__init__(config, INFO)
        self.kills, self.period, self.at_once = kills, period, at_once
        self.poisons: set[int] = set()

    def _check(self, plan) -> None:
        for new in plan.new:
            self.poisons.discard(new.slot)
            if new.token_ids[0] == POISON:
                self.poisons.add(new.slot)
        for slot, start, count in zip(
            plan.slots.tolist(), plan.num_computed.tolist(), plan.num_tokens.tolist(), strict=True
        ):
            is_decode = count == 1 and start > 8
            if slot in self.poisons and is_decode == (self.kills == "decode") and not start % self.period:
                raise CallboardError("Rank 0 is gone.")

    def submit(self, plan) -> None:
        if self.at_once:
            self._check(plan)
        super().submit(plan)

    def collect(self):
        if not self.at_once:
            self._check(decode_plan(self.queue[0][-1]))
        return super().collect()


class Engine:
    """An EngineCore that gets new runners whenever it loses them."""

    max_tokens = 60

    def __init__(self, *poisons: int, num: int = 10, **kw) -> None:
        runner = {name: kw.pop(name) for name in ("kills", "period", "at_once") if name in kw}
        self.config = EngineConfig(**{"block_size": 4, "max_num_seqs": 12, "max_num_batched_tokens": 64, **kw})
        self.start = lambda: PoisonedRunner(self.config, **runner)
        self.core = CheckedCore(self.config, INFO, self.start())
        self.requests, self.outputs, self.culprits, self.num_losses = {}, {}, [], 0
        for i in range(num):
            self.add(f"r{i}", [POISON if i in poisons else 1 + i, 2, 3 + i % 3, *range(i)])

    def add(self, name: str, prompt: list[int]) -> None:
        params = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)
        self.requests[name] = Request(name, prompt, len(prompt), params)
        self.outputs[name] = []
        self.core.add(self.requests[name])

    def lose(self) -> None:
        self.num_losses += 1
        if (culprit := self.core.lose()) is not None:
            self.culprits.append(culprit.state.request.request_id)
            assert culprit.num_losses >= MAX_LOSSES
        self.core.recover(self.start())

    def step(self) -> None:
        try:
            output = self.core.step()
        except CallboardError:
            self.lose()
            return
        for state, token in zip(*((output.states, output.token_ids) if output else ((), ())), strict=True):
            self.outputs[state.request.request_id].append(token)

    def finish(self) -> None:
        for _ in range(4000):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work
        for name, sent in self.requests.items():
            if name not in self.culprits:
                assert self.outputs[name] == sequential(sent, 256)[0], name
        assert not self.core.extras[Isolation]._goals


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("how", [{}, {"at_once": True}, {"kills": "prompt"}, {"kills": "prompt", "at_once": True}])
def test_a_killer_request_ends_at_its_third_loss(depth, prefix_cache, how):
    for poison in (0, 4, 9):
        engine = Engine(poison, pipeline_depth=depth, prefix_cache=prefix_cache, **how)
        engine.finish()
        assert engine.culprits == [f"r{poison}"]
        assert engine.num_losses == MAX_LOSSES


def test_each_of_several_killer_requests_is_found():
    engine = Engine(2, 3, 7)
    engine.finish()
    assert sorted(engine.culprits) == ["r2", "r3", "r7"]
    assert engine.num_losses <= 3 * MAX_LOSSES


@pytest.mark.parametrize("period", [2, 3, 11, 20])
def test_an_occasional_killer_is_found_or_finishes(period):
    """While it makes progress between its losses, each loss is only a pause."""
    engine = Engine(5, period=period)
    engine.finish()
    assert engine.culprits == ["r5"] * (period < 4)
    assert engine.num_losses <= max(MAX_LOSSES, 60 // period + 1)


def test_requests_beside_a_killer_are_not_blamed():
    """New requests at every step: they wait for the trials, and are served after them."""
    engine = Engine(4)
    for i in range(30):
        engine.add(f"late{i}", [1 + i % 20, 5, 6])
        engine.step()
    engine.finish()
    assert engine.culprits == ["r4"]
    assert engine.num_losses == MAX_LOSSES


@pytest.mark.parametrize("depth", [1, 2])
def test_losses_without_a_killer_end_no_request(depth):
    """Runners are lost again and again, except while one request runs alone."""
    engine = Engine(pipeline_depth=depth)
    for step in range(1000):
        if not engine.core.has_work:
            break
        engine.core.submit()
        rows = {state for step in engine.core.scheduler._in_flight for state in step.rows}
        if step % 7 == 3 and len(rows) > 1:
            engine.lose()
        engine.step()
    assert engine.num_losses >= MAX_LOSSES
    assert engine.culprits == []
    engine.finish()


class CrowdedRunner(FakeRunner):
    """Dies of a plan with `most_new` new requests, or of a step with `most_rows` rows."""

    def __init__(self, config, most_new: int = 99, most_rows: int = 99, never_beside: int | None = None) -> None:
        super().__init__(config, INFO)
        self.most_new, self.most_rows, self.never_beside = most_new, most_rows, never_beside
        self.loners: set[int] = set()

    def submit(self, plan) -> None:
        self.loners -= set(plan.freed.tolist())
        self.loners |= {new.slot for new in plan.new if new.token_ids[0] == self.never_beside}
        is_spoilt = len(plan.slots) > 1 and bool(self.loners & set(plan.slots.tolist()))
        if len(plan.new) > self.most_new or len(plan.slots) > self.most_rows or is_spoilt:
            raise CallboardError("a frame exceeds the limit")
        super().submit(plan)


class Crowd(Engine):
    """Requests that kill the runners only together."""

    max_tokens = 12

    def __init__(self, num: int, num_late: int = 0, max_num_seqs: int = 16, **runner) -> None:
        super().__init__(num=num, max_num_seqs=max_num_seqs, max_num_batched_tokens=256)
        self.start = lambda: CrowdedRunner(self.config, **runner)
        self.core.recover(self.start())
        self.num_late = num_late

    def step(self) -> None:
        if self.num_late:
            self.num_late -= 1
            self.add(f"late{self.num_late}", [1 + self.num_late % 20, 5, 6])
        super().step()


@pytest.mark.parametrize("num_late", [0, 9])
def test_requests_that_kill_together_return_one_by_one(num_late):
    """They pass their trials, and would return together in one plan again and again: 2 losses for 4 tokens of each."""
    engine = Crowd(10, num_late, most_new=6)
    engine.finish()
    assert engine.culprits == []
    assert engine.num_losses <= (MAX_LOSSES - 1) * (2 if num_late else 1)  # late ones pile up during the trials


@pytest.mark.parametrize("most_rows", [1, 5])
def test_a_crowd_is_limited_to_a_size_that_runners_survive(most_rows):
    engine = Crowd(9, most_rows=most_rows)
    engine.finish()
    assert engine.culprits == []
    assert engine.num_losses <= MAX_LOSSES + 1


def test_a_request_that_kills_beside_any_other_ends():
    engine = Crowd(7, num_late=10, never_beside=4)  # the fourth request's first token
    engine.finish()
    assert set(engine.culprits) <= {"r3", "late3"}
    assert engine.num_losses <= 4 * MAX_LOSSES


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 7), st.integers(0, 5), st.integers(1, 6), st.integers(1, 6), st.integers(0, 9))
def test_every_crowd_finishes(num, num_late, most_new, most_rows, loner):
    engine = Crowd(num, num_late, most_new=most_new, most_rows=most_rows, never_beside=loner or None)
    engine.finish()
    assert engine.num_losses <= 3 * (num + num_late)


def test_a_suspect_may_leave_during_its_trial():
    engine = Engine(4)
    while engine.num_losses < MAX_LOSSES - 1:
        engine.step()
    engine.step()
    (suspect,) = engine.core.scheduler.running
    name = suspect.request.request_id
    engine.core.abort(name)
    engine.culprits.append(name)  # its answer is not looked at
    engine.finish()
    assert engine.culprits == [name, "r4"]


class PoisonedEngine(links.Engine):
    """An engine loop with its thread and sockets. Its runners die of decode rows of one request."""

    def start_runners(self):
        self.runners.append(PoisonedRunner(self.config))
        return self.runners[-1], links.INFO


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_only_the_request_at_fault_gets_an_error(num_engines: int):
    """With another engine the streams move once, including the one at fault, and then stay where it is found."""
    engines = [PoisonedEngine() for _ in range(num_engines)]
    link = link_to(*engines)
    await link.start()
    await eventually(lambda: len(link.engines()) == num_engines)
    poison = Request("poison", [POISON] * 9, 9, SamplingParams(max_tokens=200, ignore_eos=True))
    reading = [asyncio.create_task(read(link, request(i, max_tokens=60))) for i in range(8)]
    _, reason, last = await read(link, poison)
    assert reason is FinishReason.ERROR
    assert last.error == "The model runners were lost 3 times while computing this request."
    for i, (tokens, reason, _) in enumerate(await asyncio.gather(*reading)):
        assert (tokens, reason) == sequential(request(i, max_tokens=60), 512)
    assert 3 <= sum(engine.loop.num_rebuilds for engine in engines) <= 3 * num_engines
    link.close()
    for engine in engines:
        engine.loop.close()
