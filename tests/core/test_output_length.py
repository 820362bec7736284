"""Expected lengths of answers, and how well they use memory, against an oracle that knows the lengths."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.base.types import Request, SamplingParams
from runtime.core.plan import StepResult
from runtime.core.request_state import RequestStatus
from runtime.policy.admission import Admission
from runtime.policy.output_length import OutputLengthEstimator
from tests.support.engine.policy_simulation import CONTEXT, Clients, Simulation
from tests.support.engine.sessions import make
from tests.support.engine.whole import whole_scheduler

CHAT = 4000  # max_tokens of a chat without the field


def learned(lengths: list[int], max_tokens: int = CHAT) -> OutputLengthEstimator:
    """Estimates from answers of these lengths that stopped by themselves, within max_tokens."""
    estimator = OutputLengthEstimator()
    for length in lengths:
        end = min(length, max_tokens)
        estimator.observe(max_tokens, 0, end)
        estimator.observe_end(max_tokens, end, stopped=length <= max_tokens)
    return estimator


def mean_of(lengths: list[int], reached: int, most: int) -> float:
    rest = [min(length, most) - reached for length in lengths if length > reached]
    return sum(rest) / len(rest)


def exponential(mean: float) -> Callable[[random.Random], float]:
    return lambda rng: rng.expovariate(1 / mean)


def heavy_tailed(median: float) -> Callable[[random.Random], float]:
    return lambda rng: rng.lognormvariate(math.log(median), 1.2)


def never(rng: random.Random) -> float:
    return CONTEXT


def test_a_new_engine_expects_short_answers():
    estimator = OutputLengthEstimator()
    assert 200 < estimator.expect(4096, 0)[0] < 300
    assert 200 < estimator.expect(131_072, 0)[0] < 310
    assert estimator.expect(16, 0)[0] > 15
    assert estimator.expect(4096, 1000)[0] > estimator.expect(4096, 100)[0]


@pytest.mark.parametrize(
    "draw", [exponential(265), heavy_tailed(150), lambda rng: 500, lambda rng: rng.choice([5, 700])]
)
def test_the_mean_rest_of_an_answer_is_learned(draw):
    rng = random.Random(1)
    lengths = [max(1, int(draw(rng))) for _ in range(600)]
    estimator = learned(lengths)
    for reached in (0, 30, 100):
        assert estimator.expect(CHAT, reached)[0] == pytest.approx(mean_of(lengths, reached, CHAT), rel=0.35)
    for most in (50, 200):  # another limit of the same class of lengths
        assert learned(lengths, most).expect(most, 0)[0] == pytest.approx(mean_of(lengths, 0, most), rel=0.2)


def test_truncated_answers_teach_nothing():
    estimator = learned([300] * 50)
    before = estimator.expect(CHAT, 0)
    for _ in range(500):
        estimator.observe(16, 0, 16)
        estimator.observe_end(16, 16, stopped=False)
    assert estimator.expect(CHAT, 0) == before
    assert estimator.expect(16, 0)[0] == pytest.approx(16, rel=0.02)


def test_learned_lengths_fade():
    estimator = learned([20] * 500)
    assert estimator.expect(CHAT, 0)[0] < 30
    for _ in range(500):
        estimator.observe(CHAT, 0, 600)
        estimator.observe_end(CHAT, 600, stopped=True)
    assert estimator.expect(CHAT, 0)[0] > 400


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.booleans()), max_size=40), st.integers(1, 5000), st.integers(0, 6000)
)
def test_an_expectation_is_within_the_limit(ends, max_tokens, reached):
    estimator = OutputLengthEstimator()
    for length, stopped in ends:
        estimator.observe(max_tokens, 0, min(length, max_tokens))
        estimator.observe_end(max_tokens, min(length, max_tokens), stopped)
    more, again = estimator.expect(max_tokens, reached)
    assert 0 <= more <= max(0, max_tokens - reached) + 1e-6
    assert again > reached


@given(st.lists(st.integers(0, 3000), min_size=2, max_size=12, unique=True))
def test_an_answer_may_be_reported_in_pieces(cuts):
    cuts = sorted(cuts)
    whole, pieces = OutputLengthEstimator(), OutputLengthEstimator()
    whole.observe(CHAT, cuts[0], cuts[-1])
    for start, end in pairwise(cuts):
        pieces.observe(CHAT, start, end)
    assert pieces.expect(CHAT, 0)[0] == pytest.approx(whole.expect(CHAT, 0)[0])


def test_the_scheduler_reports_only_complete_lengths():
    """Stops and stop strings are ends; limits, aborts and requests that ignore EOS are not."""
    told = []
    for params, how in (
        (SamplingParams(max_tokens=30), "stop"),
        (SamplingParams(max_tokens=30, stop=("x",)), "abort"),
        (SamplingParams(max_tokens=30), "abort"),
        (SamplingParams(max_tokens=30, ignore_eos=True), "abort"),
    ):
        scheduler = whole_scheduler(*make())
        scheduler.extras[Admission].lengths.observe_end = lambda *end: told.append(end)
        state = scheduler.add(Request("a", [1, 2], 2, params))
        for token in (5, 5, 0 if how == "stop" else 5):
            step = scheduler.schedule()
            scheduler.commit(StepResult(step.plan.step_id, np.array([token], np.int32)))
        scheduler.abort("a")
        assert state.status is RequestStatus.ENDED
    assert told == [(30, 3, True), (30, 3, True), (30, 3, False)]


CASES = {
    "chats": [Clients(64, exponential(130))],
    "chats with a heavy tail": [Clients(64, heavy_tailed(80))],
    "short": [Clients(64, never, max_tokens=16)],
    "mostly short": [Clients(13, exponential(130)), Clients(51, never, max_tokens=16)],
    "heavy tail and cut": [Clients(32, heavy_tailed(80)), Clients(32, exponential(250), max_tokens=64)],
    "a few long ones": [Clients(8, exponential(300))],
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_memory_use_is_near_that_of_an_oracle(case: str):
    """Cold and then warm: 90 % of the requests run at a time that would if their lengths were known, and few are
    preempted."""
    num = {"short": 500, "mostly short": 2000, "heavy tail and cut": 1200}.get(case, 300)
    contexts = 1 if case == "a few long ones" else 3
    oracle, estimate = (Simulation(*CASES[case], contexts=contexts, knows_lengths=knows) for knows in (True, False))
    for _ in ("cold", "warm"):
        best, _ = oracle.run(num)
        concurrency, preemptions = estimate.run(num)
        assert concurrency >= 0.9 * best
        assert preemptions < 0.05


@pytest.mark.parametrize("length", [1, 30, 300, 4000, 100_000])
def test_one_answer_does_not_decide(length):
    new, taught = OutputLengthEstimator(), learned([length], 131_072)
    for reached in (0, 100):
        assert 1 / 2 < taught.expect(131_072, reached)[0] / new.expect(131_072, reached)[0] < 8
