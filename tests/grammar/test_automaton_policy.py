"""The policy of automata against an oracle that knows all requests, in a simulation of requests with grammars."""

import itertools

import numpy as np
import pytest

from runtime.structured.matching.automaton_policy import MOST_STEP_US, AutomatonPolicy
from tests.support.structured.cases import regex
from tests.support.structured.engine import answers, hot, runner_of

VOCABULARY = 128_000
MASK_S = 40e-6  # of the host, a token
PRIOR_S = AutomatonPolicy(0.0, VOCABULARY).expected_s("x" * 1000) / 1000  # a byte


def expression(size: int) -> str:
    return "x" * size


def simulate(policy: AutomatonPolicy, requests: list[tuple[int, int]], sizes: list[int], build_s: float) -> dict:
    """Seconds on masks and in builds; (grammar, tokens) of each request, in order. A build takes `build_s` a byte."""
    host = dict.fromkeys(range(len(sizes)), 0.0)
    built: dict[int, float] = {}
    for grammar, num_tokens in requests:
        if grammar not in built and policy.pays(host[grammar], expression(sizes[grammar])):
            built[grammar] = sizes[grammar] * build_s
            policy.built(expression(sizes[grammar]), built[grammar])
        if grammar not in built:
            host[grammar] += num_tokens * MASK_S
    return {"host": sum(host.values()), "builds": built, "total": sum(host.values()) + sum(built.values())}


def oracle(requests: list[tuple[int, int]], sizes: list[int], build_s: float) -> float:
    """Return the seconds of an oracle that knows all requests: it builds each grammar at once, or never."""
    masks = [0.0] * len(sizes)
    for grammar, num_tokens in requests:
        masks[grammar] += num_tokens * MASK_S
    return sum(min(of, size * build_s) for of, size in zip(masks, sizes, strict=True))


def draw(seed: int, num_grammars: int, num_requests: int, skew: float) -> tuple[list[tuple[int, int]], list[int]]:
    """Sizes as those of real schemas, some kilobytes; answers of some hundred tokens."""
    random = np.random.default_rng(seed)
    sizes = random.lognormal(7.0, 1.2, num_grammars).astype(int) + 50
    weights = np.arange(1, num_grammars + 1) ** -skew
    grammars = random.choice(num_grammars, num_requests, p=weights / weights.sum())
    tokens = random.lognormal(5.0, 0.7, num_requests).astype(int) + 1
    return list(zip(grammars.tolist(), tokens.tolist(), strict=True)), sizes.tolist()


@pytest.mark.parametrize("slower", [0.5, 1.0, 4.0], ids=lambda x: f"builds take {x} times the prior")
@pytest.mark.parametrize("skew", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_no_mix_costs_much_more_than_twice_the_best(seed: int, skew: float, slower: float):
    requests, sizes = draw(seed, 60, 20_000, skew)
    build_s = PRIOR_S * slower
    found = simulate(AutomatonPolicy(1000.0, VOCABULARY), requests, sizes, build_s)
    best = oracle(requests, sizes, build_s)
    assert best <= found["total"] <= 2.25 * best
    lazy = simulate(AutomatonPolicy(MOST_STEP_US, VOCABULARY), requests, sizes, build_s)
    if skew == 2.0:  # few grammars have most requests
        assert found["total"] < lazy["total"] / 3


def test_grammars_that_do_not_come_back_are_never_built():
    requests = [(grammar, 2000) for grammar in range(500)]
    found = simulate(AutomatonPolicy(1000.0, VOCABULARY), requests, [300] * 500, PRIOR_S)
    assert not found["builds"]


def test_one_grammar_in_steady_use_is_built_once_it_has_paid():
    requests = [(0, 200)] * 1000
    found = simulate(AutomatonPolicy(1000.0, VOCABULARY), requests, [2500], PRIOR_S)
    assert found["builds"] == {0: 2500 * PRIOR_S}
    assert 0.9 < found["builds"][0] < 1.0  # a second of CPU, with this vocabulary
    assert found["builds"][0] <= found["host"] <= found["builds"][0] + 200 * MASK_S


@pytest.mark.parametrize("step_us", [MOST_STEP_US, 5000.0, float("inf")])
def test_long_steps_hide_masks_and_have_no_automata(step_us: float):
    found = simulate(AutomatonPolicy(step_us, VOCABULARY), [(0, 200)] * 10_000, [300], PRIOR_S)
    assert not found["builds"]


def test_what_takes_too_long_is_not_tried():
    policy = AutomatonPolicy(1000.0, VOCABULARY, most_s=5.0)
    sizes = [int(5.0 / PRIOR_S * share) for share in (0.99, 1.01)]
    assert [policy.pays(1e6, expression(size)) for size in sizes] == [True, False]


def test_it_learns_what_builds_take():
    policy = AutomatonPolicy(1000.0, VOCABULARY)
    for _ in range(20):
        policy.built(expression(5000), 5000 * PRIOR_S * 3)
    expected = [policy.expected_s(expression(size)) / size for size in (100, 10_000)]
    assert all(2.8 * PRIOR_S < each < 3 * PRIOR_S for each in expected)
    assert all(a == pytest.approx(b) for a, b in itertools.pairwise(expected))


def test_a_runner_accounts_for_the_masks_of_each_grammar():
    runner, grammars = runner_of(), [regex("[ab]{30}"), regex("c{3}"), None]
    answers(runner, [hot(grammar, max_tokens=40) for grammar in grammars])
    runner.reset()
    engines = runner.masks._engines.result()
    long, short = (engines._entries[grammar.key].host_s for grammar in grammars[:2])
    assert 0 < short < long
    assert not engines.policy.pays(1e9, "c"), "the steps of a CPU hide its masks"
    assert runner_of(is_draft=True).masks._engines.result().policy is None
