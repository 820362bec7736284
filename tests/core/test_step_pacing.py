"""Prompts beside decode rows, and late planning: the policy in simulated time, over the real scheduler."""

import random
from collections import deque

import numpy as np
import pytest

from runtime.core.plan import StepPlan, StepResult
from runtime.policy.step_pacing import StepPacing
from runtime.spec.config import EngineConfig, ModelInfo
from runtime.spec.types import Request, SamplingParams
from tests.support.engine.fake_runner import FixedPacing
from tests.support.engine.whole import whole_scheduler

# Measured steps of a 3B model on one H200, by number of tokens, and the time that decode rows and their contexts add.
STEP_TOKENS = [1, 16, 64, 128, 256, 512, 768, 1024, 1536, 2048, 4096, 8192]
STEP_US = [1720, 1900, 2500, 2620, 3320, 5350, 8000, 10300, 15500, 21300, 43000, 86000]
ROW_US, POSITION_US, LAUNCH_US = 5.0, 0.024, 350.0
DECODE_US = 2100.0  # of a few rows


def step_us(plan: StepPlan) -> float:
    decoding = plan.num_tokens == 1
    rows_us = ROW_US * int(decoding.sum()) + POSITION_US * int(plan.ends[decoding].sum())
    if decoding.all():
        return rows_us + (STEP_US[0] if len(decoding) == 1 else DECODE_US)
    return rows_us + float(np.interp(plan.num_tokens.sum(), STEP_TOKENS, STEP_US))


class Served:
    """Requests (arrival in seconds, prompt length, output length) served by one simulated device."""

    def __init__(self, requests, max_itl_ms=None, paced=True, late=True, slow=1.0):
        self.now = 0.0
        info = ModelInfo("f", 2, 4096, (), 40000, 16, "none", "none")
        config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=8192, prefix_cache=False)
        pacing = StepPacing(max_itl_ms, lambda: self.now) if paced else None
        self.scheduler, self.late, self.slow = whole_scheduler(config, info, pacing), late, slow
        self.arrivals = deque(sorted(requests))
        self.arrived: dict[str, float] = {}
        self.times: dict[str, list[float]] = {}  # of each request's tokens
        self.run()

    def run(self):
        in_flight, free_at = deque(), 0.0
        while self.arrivals or self.scheduler.requests or in_flight:
            self.take_arrivals()
            while self.late and (delay_s := self.scheduler.planning_delay_s()) > 0:
                self.now = min(self.now + delay_s, self.arrivals[0][0] if self.arrivals else np.inf)
                self.take_arrivals()
            while len(in_flight) < 2 and not (self.late and self.scheduler.planning_delay_s() > 0):
                if (step := self.scheduler.schedule()) is None:
                    break
                free_at = max(free_at, self.now + LAUNCH_US / 1e6) + self.slow * step_us(step.plan) / 1e6
                in_flight.append((free_at, step.plan))
            if self.late and len(in_flight) < 2 and self.scheduler.planning_delay_s() > 0:
                continue
            if not in_flight:
                self.now = self.arrivals[0][0]
                continue
            end, plan = in_flight.popleft()
            self.now = max(self.now, end)
            output = self.scheduler.commit(StepResult(plan.step_id, np.ones(int(plan.num_samples.sum()), np.int32)))
            for state in output.states:
                self.times[state.request.request_id].append(self.now)

    def take_arrivals(self):
        while self.arrivals and self.arrivals[0][0] <= self.now:
            at, prompt_len, output_len = self.arrivals.popleft()
            params = SamplingParams(max_tokens=output_len, ignore_eos=True)
            name = str(len(self.times))
            self.scheduler.add(Request(name, [1] * prompt_len, prompt_len, params))
            self.arrived[name], self.times[name] = at, []

    @property
    def first_token_ms(self):
        return np.array([times[0] - self.arrived[name] for name, times in self.times.items()]) * 1e3

    @property
    def gaps_ms(self):
        return np.concatenate([np.diff(times) for times in self.times.values()]) * 1e3

    @property
    def rate(self):
        """Output tokens a second."""
        return sum(map(len, self.times.values())) / self.now


def arrivals(count, rate, inputs, outputs, seed=0):
    rng, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate) if rate else 0.0
        found.append((at, rng.randint(*inputs), rng.randint(*outputs)))
    return found


LONG = arrivals(200, 6, (1024, 2048), (64, 256))


def test_rows_that_decode_do_not_wait_for_whole_prompts():
    plain, paced = Served(LONG, paced=False), Served(LONG)
    assert np.percentile(plain.gaps_ms, 99.9) > 18
    assert np.percentile(paced.gaps_ms, 99.9) < 14
    assert np.percentile(paced.gaps_ms, 99) < 5.5 * DECODE_US / 1e3
    assert np.median(paced.first_token_ms) < 1.35 * np.median(plain.first_token_ms)
    assert paced.rate > 0.99 * plain.rate


@pytest.mark.parametrize(("max_itl_ms", "slow"), [(4.0, 1.0), (8.0, 0.7), (12.0, 1.5)])
def test_a_target_is_kept_on_every_host(max_itl_ms, slow):
    served = Served(LONG[:100], max_itl_ms, slow=slow)
    assert np.percentile(served.gaps_ms, 98) < 1.15 * max_itl_ms


@pytest.mark.parametrize("count", [48, 400])
def test_a_burst_is_served_as_fast(count):
    """Where many prompts wait for few rows that decode, those rows wait."""
    before = [(0.0, 300, 50), (0.5, 300, 50)]  # the pacing learns step times from them
    burst = before + [(1.0, *lengths) for _, *lengths in arrivals(count, 0, (128, 384), (128, 256))]
    plain, paced = Served(burst, paced=False), Served(burst)
    assert paced.now - 1.0 < 1.02 * (plain.now - 1.0)
    assert np.median(paced.first_token_ms) < 1.15 * np.median(plain.first_token_ms)
    assert np.percentile(paced.gaps_ms, 99) <= max(np.percentile(plain.gaps_ms, 99), 5.5 * DECODE_US / 1e3)


@pytest.mark.parametrize("num_decoding", [1, 30, 64, 200])
def test_steps_fill_their_graphs(num_decoding):
    """Decode rows count, too: unused rows of a graph take the same time."""
    now, totals = [0.0], set()
    pacing = StepPacing(None, lambda: now[0])
    for took_s, num_prompt_tokens in ((0.002, 0), (0.004, 200)):
        now[0] += took_s
        pacing.observe_step(num_decoding, num_prompt_tokens, 0.0)
    for num_queued in range(100, 20000, 100):
        count = pacing.prompt_tokens_beside(num_decoding, num_queued)
        totals.add(num_decoding + count)
        wanted = max(800, 0.35 * num_queued)
        assert wanted - (128 if wanted + num_decoding < 2048 else 2048) <= count <= wanted
    assert all(total % 128 == 0 and (total < 2048 or total % 2048 == 0) for total in totals)
    assert len(totals) > 5


def test_a_target_too_short_for_any_prompt_is_exceeded():
    served = Served(LONG[:20], max_itl_ms=0.5)
    assert all(times for times in served.times.values())


def test_a_new_request_waits_only_for_the_running_step():
    steady = arrivals(100, 12, (64, 128), (64, 256))
    early, late = Served(steady, late=False), Served(steady)
    saved_ms = np.mean(early.first_token_ms) - np.mean(late.first_token_ms)
    assert saved_ms > 0.4 * DECODE_US / 1e3
    assert np.mean(late.gaps_ms) < 1.01 * np.mean(early.gaps_ms)  # and the device waits for no plan


def test_short_steps_are_planned_at_once():
    """There a plan could be late, and the gain would be small."""
    served = Served(arrivals(50, 20, (64, 128), (64, 256)), slow=0.25)
    assert served.scheduler.extras[StepPacing].delay_s(4, 0, served.now) <= 0.0


def test_an_outlier_does_not_count_as_step_time():
    now = [0.0]
    pacing = StepPacing(None, lambda: now[0])
    for took_s in (0.002,) * 20 + (3.0,):
        now[0] += took_s
        pacing.observe_step(1, 0, 0.0)
    assert pacing.delay_s(1, 0, now[0]) < 0.003


def test_rows_that_finish_a_prompt_limit_no_other():
    """A step without decode rows takes all that its budget holds."""
    info = ModelInfo("f", 2, 4096, (), 40000, 16, "none", "none")
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, prefix_cache=False)
    scheduler = whole_scheduler(config, info, FixedPacing(4))
    for name, prompt_len in (("long", 100), ("short", 20)):
        scheduler.add(Request(name, [1] * prompt_len, prompt_len, SamplingParams(max_tokens=5, ignore_eos=True)))
    assert scheduler.schedule().plan.num_tokens.tolist() == [64]
    assert scheduler.schedule().plan.num_tokens.tolist() == [36, 20]
