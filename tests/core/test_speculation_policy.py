"""How many guesses are made, over whole requests. Steps of an 8B model on an H200 are simulated with about their
measured times. Drafts of 0.32 and 2.47 GB, and an EAGLE-3 head, are right at independent random places."""

import random
from types import SimpleNamespace

import pytest

from runtime.base.config import EngineConfig
from runtime.core.request_state import RequestStatus
from runtime.speculation.choose_k import DecodeShape, Drafter, Speculation, StepTimes
from runtime.speculation.draft import row_lens
from runtime.speculation.draft_client import FIRST_ROUND_US, FIRST_ROW_US

STEP_US = ((1, 3650.0), (2, 3900.0), (4, 3950.0), (8, 4000.0), (16, 4100.0), (32, 4350.0), (64, 4800.0), (128, 5370.0))
verify_us = StepTimes(STEP_US).us


class Draft(Drafter):
    """`step_us` and, in a round, `overhead_us` more than its steps and the target's."""

    def __init__(self, step_us, overhead_us):
        self.one_us, self.overhead_us = step_us, overhead_us

    def step_us(self, num_rows):
        return self.one_us * (1 + num_rows / 200)

    def guess(self, state, most):
        return [0] * most

    def forget(self, state):
        pass


class State(SimpleNamespace):
    __hash__ = object.__hash__


SMALL, LARGE, HEAD = Draft(90.0, 2000.0), Draft(730.0, 1600.0), Draft(207.0, 60.0)


def speedups(draft, rate, num_rows=1, num_answers=12, seed=0, output_len=384):
    """Tokens a second over the rate without a draft, for answers one after another, each of `num_rows` requests.
    Guesses are right at this `rate`: one, or one for each position, or a function of the answer's index that returns
    these. The first answer is left out."""
    rng, now = random.Random(seed), [0.0]
    speculation = Speculation(draft, None, STEP_US, FIRST_ROUND_US, lambda: now[0], FIRST_ROW_US)
    plain_us, found = verify_us(num_rows) + 100.0, []
    for number in range(num_answers):
        share = rate(number) if callable(rate) else rate
        states = [
            State(max_len=10**9, num_total=0, tokens=[], num_computed=-1, status=RequestStatus.RUNNING)
            for _ in range(num_rows)
        ]
        began, lengths = now[0], [0] * num_rows
        while min(lengths) < output_len:
            speculation.begin_step(states)
            counts = [len(speculation.drafts(s, 8)) if speculation.round_count else 0 for s in states]
            most, num_tokens = max(counts), num_rows + sum(counts)
            round_us = verify_us(num_tokens) + most * draft.step_us(num_rows) + draft.overhead_us + 40.0 * num_rows
            now[0] += (round_us if most else plain_us) * rng.gauss(1.0, 0.02) / 1e6
            for i, (state, count) in enumerate(zip(states, counts, strict=True)):
                lengths[i] += 1
                chances = share if isinstance(share, tuple) else (share,) * count
                right = next((j for j in range(count) if rng.random() >= chances[j]), count)
                lengths[i] += right
                if count:
                    speculation.on_verified(state, right, right < count)
            speculation.observe_step(DecodeShape(num_rows, num_tokens, most))
        found.append(sum(lengths) / (now[0] - began) * plain_us / 1e6 / num_rows)
    return found[1:]


def mean(values):
    return len(values) / sum(1 / v for v in values)


@pytest.mark.parametrize(
    ("draft", "rate", "least"),
    [
        (SMALL, 0.0, 0.985), (SMALL, 0.2, 0.985), (SMALL, 0.5, 1.08), (SMALL, 0.65, 1.5), (SMALL, 0.81, 2.35),
        (SMALL, 0.9, 3.15), (LARGE, 0.2, 0.985), (LARGE, 0.5, 0.985), (LARGE, 0.65, 1.05), (LARGE, 0.81, 1.5),
        (LARGE, 0.9, 1.93), (HEAD, 0.0, 0.985), (HEAD, 0.5, 1.45),
    ],
)  # fmt: skip
def test_good_drafts_are_used_and_bad_ones_cost_little(draft, rate, least):
    assert mean([s for seed in range(4) for s in speedups(draft, rate, seed=seed)]) > least


@pytest.mark.parametrize(("draft", "least"), [(SMALL, 2.55), (LARGE, 1.55)])
def test_a_draft_is_tried_again_when_texts_change(draft, least):
    """Later answers begin with the estimates learned from earlier ones."""
    for seed in range(4):
        found = speedups(draft, lambda answer: 0.3 if answer < 6 else 0.85, seed=seed)
        assert mean(found[6:]) > least


@pytest.mark.parametrize(
    ("num_rows", "rate", "small", "large"),
    [
        (8, 0.81, 2.2, 1.45),
        (8, 0.3, 0.985, 0.985),
        (32, 0.81, 1.45, 1.2),
        (32, 0.3, 0.985, 0.985),
        (64, 0.81, 0.985, 0.985),
    ],
)
def test_batches_learn_the_best_number_of_guesses(num_rows, rate, small, large):
    assert mean(speedups(SMALL, rate, num_rows, num_answers=4)) > small
    assert mean(speedups(LARGE, rate, num_rows, num_answers=4)) > large


def best_fixed(draft, shares, num_rows):
    """The best number of draft tokens if each position's rate is known, and its speed over plain decoding."""
    speeds, tokens, all_right = [1.0], 1.0, 1.0
    for count, share in enumerate(shares[:7], 1):
        all_right *= share
        tokens += all_right
        extra_us = count * draft.step_us(num_rows) + draft.overhead_us + 40.0 * num_rows
        speeds.append(tokens * (verify_us(num_rows) + 100.0) / (verify_us(num_rows * (1 + count)) + extra_us))
    return speeds.index(max(speeds)), max(speeds)


def profile(rng):
    """Rates that fall with the position, as a head's do."""
    first, fall = rng.choice([0.2, 0.5, 0.7, 0.85, 0.95]), rng.uniform(0, 0.25)
    return tuple(max(0.0, first - fall * i * rng.random()) for i in range(8))


@pytest.mark.long
@pytest.mark.parametrize(("num_rows", "num_answers"), [(1, 12), (8, 5), (64, 4)])
@pytest.mark.parametrize("draft", [HEAD, SMALL], ids=["head", "small"])
def test_any_profile_gets_nearly_the_best_number(draft, num_rows, num_answers):
    """Within 2 % over many profiles. One profile may lose more where its best number gains little."""
    ratios = []
    for seed in range(12):
        shares = profile(random.Random(seed))
        speed = mean(speedups(draft, shares, num_rows, num_answers, seed)[1:])
        assert speed > 0.98, (seed, shares)
        ratios.append(speed / best_fixed(draft, shares, num_rows)[1])
    assert mean(ratios) > 0.98, ratios
    assert min(ratios) > 0.93, ratios


def test_a_third_token_that_is_never_right_is_left_out():
    """One rate for all positions would draft seven tokens."""
    shares = (1.0, 1.0, *[0.0] * 6)
    count, best = best_fixed(HEAD, shares, 1)
    assert count == 2
    assert mean(speedups(HEAD, shares)) > 0.98 * best


class Matches(Drafter):
    """Draft tokens of two kinds; the second kind has long matches."""

    first_acceptance = (0.5, 0.9)
    most = most_chosen = 15

    def kind(self, state):
        return state.kind

    def guess(self, state, most):
        return [0] * most if state.kind is not None else None

    def forget(self, state):
        pass


def test_each_kind_has_its_own_number_of_guesses():
    """A request copies for some time, then writes on its own, where shorter matches are mostly wrong."""
    speculation, rng = Speculation(Matches(), None, STEP_US, 150.0), random.Random(0)
    state = State(max_len=10**9, num_total=1, tokens=[0], num_computed=0, status=RequestStatus.RUNNING)
    counts: dict[int | None, list[int]] = {None: [], 0: [], 1: []}
    for step in range(600):
        state.kind = (1, 0, None)[step // 20 % 3]
        speculation.begin_step([state])
        guesses = speculation.drafts(state, 100) if speculation.is_drafting else []
        counts[state.kind].append(len(guesses))
        right = next((i for i in range(len(guesses)) if rng.random() > (0.97 if state.kind else 0.1)), len(guesses))
        if guesses:
            speculation.on_verified(state, right, right < len(guesses))
    assert counts[1][-1] == 15
    assert sum(counts[0][-50:]) <= 50
    assert not any(counts[None]), "a step without a match overlaps with the next one"


def test_long_matches_stay_within_the_measured_sizes():
    speculation = Speculation(Matches(), None, STEP_US, 150.0)
    speculation.acceptance[1].rates = [0.97] * 15
    rows = [State(kind=1, max_len=1000, num_total=1) for _ in range(64)]
    for num_rows in range(1, 65):
        speculation.choose_k(rows[:num_rows])
        assert speculation.round_count <= 7 or num_rows * (1 + speculation.round_count) <= STEP_US[-1][0]
    for state in rows[1:]:
        state.kind = None
    speculation.choose_k(rows)
    assert speculation.round_count == 0, "one row of 64 does not pay for the others"


def test_batches_too_large_to_draft_look_nothing_up():
    """A look-up takes tens of microseconds a request."""

    class Counted(Matches):
        num_kinds = 0

        def kind(self, state):
            self.num_kinds += 1
            return 1

    drafter = Counted()
    speculation = Speculation(drafter, None, ((1, 100.0), (256, 25_600.0), (4096, 409_600.0)), 150.0)
    speculation.choose_k([State(max_len=1000, num_total=1) for _ in range(256)])
    assert (speculation.round_count, drafter.num_kinds) == (0, 0)


def test_graphs_fit_the_rows_that_are_chosen():
    assert row_lens(EngineConfig(draft="ngram"), False) == (2, 3, 4, 5, 6, 7, 8, 16)
    assert row_lens(EngineConfig(draft="a-model"), False) == (2, 3, 4, 5, 6, 7, 8)
    assert row_lens(EngineConfig(draft="ngram", num_draft_tokens=2), False) == (2, 3)
    assert row_lens(EngineConfig(), False) == ()
