"""Prompts beside decode rows, and late planning: the policy in simulated time, over the real scheduler."""

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.types import Request, SamplingParams
from runtime.core.plan import StepPlan, StepResult
from runtime.policy import step_pacing
from runtime.policy.step_pacing import StepPacing
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

    def __init__(self, requests, max_itl_ms=None, paced=True, late=True, slow=1.0, device=step_us, budget=8192):
        self.now = 0.0
        info = ModelInfo("f", 2, 40000, (), 40000, 16, "none", "none")
        config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=budget, prefix_cache=False)
        self.pacing = pacing = StepPacing(max_itl_ms, lambda: self.now) if paced else None
        self.scheduler, self.late, self.slow = whole_scheduler(config, info, pacing), late, slow
        self.device, self.steps_us = device, []
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
                self.steps_us.append(self.slow * self.device(step.plan))
                free_at = max(free_at, self.now + LAUNCH_US / 1e6) + self.steps_us[-1] / 1e6
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
    for took_s, num_prompt_tokens in ((0.002, 0), (0.004, 200)) * 5:
        now[0] += took_s
        pacing.observe_step(num_decoding, num_prompt_tokens, 0.0)
    for num_queued in range(100, 20000, 100):
        count = pacing.prompt_tokens_beside(num_decoding, num_decoding, num_queued)
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


# ---- slow devices ----------------------------------------------------------------------------------------------------

BOUND_US = 300e3  # the share of the waiting tokens takes at most this time
CHAT = (0.0, 40, 1000)


class Cpu:
    """A device with a time for each step, and a time for each prompt token that grows with its context."""

    def __init__(self, decode_us, token_us, slope, slow_steps=(), slowness=1.0):
        """A token behind `n` others takes `token_us + slope * n`. Steps with these numbers take `slowness` as long."""
        self.decode_us, self.token_us, self.slope = decode_us, token_us, slope
        self.slow_steps, self.slowness, self.num_steps = frozenset(slow_steps), slowness, 0

    def prompt_us(self, start, count):
        return count * (self.token_us + self.slope * (start + count / 2))

    def __call__(self, plan):
        self.num_steps += 1
        rows = zip(plan.num_computed.tolist(), plan.num_tokens.tolist(), strict=True)
        us = self.decode_us + sum(self.prompt_us(start, count) for start, count in rows if count > 1)
        return us * (self.slowness if self.num_steps in self.slow_steps else 1.0)


QWEN = Cpu(25e3, 4.3e3, 0.42)  # 1.5B with quantized weights on two cores
CPUS = st.builds(
    lambda decode_us, token_us, growth: Cpu(decode_us, token_us, growth * token_us),
    st.floats(5e3, 80e3), st.floats(500.0, 9e3), st.floats(0.0, 2e-4),
)  # fmt: skip


def gaps_us(served, name="0", since=0.0):
    times = np.array(served.times[name])
    return np.diff(times[times >= since]) * 1e6


@given(device=CPUS, prompt_len=st.integers(100, 12000))
@settings(max_examples=30)
def test_a_stream_goes_on_beside_a_prompt(device, prompt_len):
    chat = (0.0, 40, 3000)
    served = Served([chat, (1.0, prompt_len, 2)], device=device, budget=512)
    bound_us = max(5 * device.decode_us, BOUND_US + device.decode_us)
    least_us = device.decode_us + device.prompt_us(prompt_len, 16)  # steps of fewer tokens would take no end
    assert gaps_us(served, since=1.0).max() <= 1.4 * max(bound_us, least_us)
    num_steps = np.searchsorted(served.times["0"], served.times["1"][0]) - np.searchsorted(served.times["0"], 1.0)
    work_us = device.prompt_us(0, prompt_len)
    assert num_steps <= 12 + work_us / (0.4 * (bound_us - device.decode_us))  # steps are not much shorter than allowed
    taken_us = (served.times["1"][0] - 1.0) * 1e6
    assert taken_us <= 1.1 * work_us + (num_steps + 2) * (device.decode_us + LAUNCH_US)


@given(device=CPUS, at=st.integers(1, 60), slowness=st.sampled_from([0.001, 10.0, 1000.0]))
@settings(max_examples=30)
def test_a_slow_step_does_not_slow_the_next(device, at, slowness):
    """It may be the first of its kind, or any later one."""
    requests = [(0.0, 40, 3000), (0.5, 3000, 2)]
    odd = Cpu(device.decode_us, device.token_us, device.slope, [at], slowness)
    served = Served(requests, device=odd, budget=512)
    gaps = np.sort(gaps_us(served))
    bound_us = max(5 * device.decode_us, BOUND_US + device.decode_us)
    assert gaps[:-2].max() <= 1.4 * max(bound_us, device.decode_us + device.prompt_us(3000, 16))
    assert len(served.times["1"]) == 2


@pytest.mark.parametrize("kind", ["decode", "prompt"])
@given(
    rows=st.integers(1, 64), noise=st.lists(st.floats(0.8, 1.25), min_size=40, max_size=40), at=st.integers(0, 39),
    odd_us=st.sampled_from([0.0, 1.0, 1e5, 1e7, 1e9]),
)  # fmt: skip
@settings(max_examples=40)
def test_no_single_sample_decides(kind, rows, noise, at, odd_us):
    now, decided = [0.0], {}
    for name in ("usual", "odd"):
        now[0], pacing, decided[name] = 0.0, StepPacing(None, lambda: now[0]), []
        for number, factor in enumerate(noise):
            for num_prompt_tokens in (0, 200):
                us = (rows * 1e3 + num_prompt_tokens * 2e3) * factor
                if name == "odd" and number == at and bool(num_prompt_tokens) == (kind == "prompt"):
                    us = odd_us
                now[0] += us / 1e6
                pacing.observe_step(rows, num_prompt_tokens, 0.0)
            tokens = pacing.prompt_tokens_beside(rows, rows, 10000)
            decided[name].append((tokens, max(0.0, pacing.delay_s(rows, tokens, now[0]))))
    for (usual, _), (odd, delay_s) in zip(decided["usual"], decided["odd"], strict=True):
        assert usual / 2.5 <= odd <= usual * 2.5
        assert delay_s <= (rows * 1e3 + odd * 2e3) * 1.25 * 1.5 / 1e6


def test_chats_go_on_beside_a_long_prompt():
    """One prompt is not worth the wait of many rows."""
    moe = Cpu(8.8e3, 24.0, 1e-4)  # 16 rows of a mixture with 35B
    chats, prompt = [(0.0, 100, 400)] * 16, (1.0, 36000, 2)
    alone, served = (Served(requests, device=moe) for requests in ([prompt], [*chats, prompt]))
    assert np.percentile(np.concatenate([gaps_us(served, str(i)) for i in range(16)]), 99) < 60e3
    assert served.first_token_ms[-1] < 1.3 * alone.first_token_ms[0]


@pytest.mark.parametrize(("fixed_us", "token_us"), [(30e3, 15.0), (20e3, 40.0), (38e3, 5.0)])
def test_a_fixed_time_does_not_keep_steps_short(fixed_us, token_us):
    """A few prompt tokens read the weights of all experts: the fewer a step has, the longer each seems to take."""
    now, count, counts = [0.0], 0, []
    pacing = StepPacing(None, lambda: now[0])
    for at in range(60):
        now[0] += (9e3 + (fixed_us + token_us * count if count else 0.0)) / 1e6
        pacing.observe_step(16, count, 0.0, 60000)
        count = pacing.prompt_tokens_beside(16, 1, 70000, 60000) if at >= 4 else 0
        counts.append(count)
    longest = max(step_pacing._CALM_US - 9e3, 4 * 9e3)
    assert fixed_us + token_us * max(counts) <= 1.2 * longest
    assert np.median(counts[30:]) >= 0.7 * (longest - fixed_us) / token_us


def test_the_first_prompt_is_computed_in_small_steps():
    served = Served([(0.0, 40, 100), (0.5, 4000, 2)], device=QWEN, budget=512)
    assert gaps_us(served).max() < 1.25 * (BOUND_US + QWEN.decode_us)


def test_cheap_tokens_are_found_beside_a_stream():
    """The first steps show little of their time, and no step has prompts alone."""
    served = Served([(0.0, 2, 3000), (0.5, 4000, 2)], device=Cpu(2e3, 10.0, 0.0))
    assert served.times["1"][0] - 0.5 < 0.1


def test_a_request_waits_for_no_long_step():
    """A prompt alone is computed in steps of some time, which cost it nothing."""
    steps_us = Served([(0.0, 1600, 2), (20.0, 7000, 2), (20.0, 7000, 2)], device=QWEN, budget=512).steps_us
    assert max(steps_us) > 2e6
    assert max(steps_us[5:]) < 1.2 * 1.5e6
    assert len(steps_us) < 1.5 * sum(steps_us) / 1.5e6 + 5


def test_a_short_prompt_does_not_wait_for_a_long_one():
    chat, long, other, short = (0.0, 40, 3000), (1.0, 7200, 2), (1.1, 7000, 2), (1.2, 300, 2)
    alone, served = (
        Served(requests, device=QWEN, budget=512) for requests in ([chat, long], [chat, long, other, short])
    )
    of_short_us = QWEN.prompt_us(0, 300)
    assert served.times["3"][0] - 1.2 < 3 * of_short_us / 1e6 + 1.0
    assert served.times["1"][0] - alone.times["1"][0] < 1.6 * of_short_us / 1e6
    assert gaps_us(served).max() < 1.25 * (BOUND_US + QWEN.decode_us)


def test_a_prompt_of_a_lower_priority_does_not_overtake():
    info = ModelInfo("f", 2, 4096, (), 40000, 16, "none", "none")
    scheduler = whole_scheduler(EngineConfig(max_num_seqs=8, prefix_cache=False), info, FixedPacing(8))
    steps = []
    for arriving in ([("chat", 2, 0)], [("long", 100, 0), ("late", 20, 1)], [("short", 30, 0)], []):
        for name, prompt_len, priority in arriving:
            params = SamplingParams(max_tokens=50)
            scheduler.add(Request(name, [1] * prompt_len, prompt_len, params, priority=priority))
        steps.append({state.request.request_id for state in scheduler.schedule().rows})
    assert steps == [{"chat"}, {"chat", "long"}, {"chat", "long", "short"}, {"chat", "long", "short"}]


@pytest.mark.parametrize(
    "requests", [LONG, [*LONG[:20], *((9.0, *lengths) for _, *lengths in arrivals(400, 0, (128, 384), (128, 256)))]]
)
def test_a_gpu_needs_no_bound(monkeypatch, requests):
    """Its steps are so short that every decision is as without the bound."""
    bounded = Served(requests)
    for name in ("_AUTO_US", "_ALONE_US"):
        monkeypatch.setattr(step_pacing, name, 1e15)
    assert Served(requests).times == bounded.times
