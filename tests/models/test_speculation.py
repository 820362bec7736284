"""Speculation changes no token of deterministic mode: the same requests with guesses of every quality and without, on a
real model."""

import time
from array import array
from functools import cache

import numpy as np
import pytest
import torch

from runtime.assembly.engine import build_engine
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.policy.admission import Admission
from runtime.speculation.acceptance import Acceptance
from runtime.speculation.choose_k import DecodeShape, Drafter, Speculation
from runtime.speculation.draft import LocalWire
from runtime.speculation.draft_client import DraftClient
from runtime.speculation.ngram import Ngram
from tests.support.engine.fake_runner import FixedShare, Recorded
from tests.support.engine.whole import whole_draft
from tests.support.models.runner_driver import TINY, tiny_runner

SAMPLING = {
    "greedy": SamplingParams(max_tokens=32, temperature=0.0),
    "0.3": SamplingParams(max_tokens=32, temperature=0.3),
    "0.7, top-k": SamplingParams(max_tokens=32, temperature=0.7, top_k=20),
    "1.0, top-p": SamplingParams(max_tokens=32, temperature=1.0, top_p=0.9),
    "1.5, all": SamplingParams(
        max_tokens=32, temperature=1.5, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.2,
        frequency_penalty=0.3, presence_penalty=-0.2, logit_bias=((3, 2.0), (9, -5.0)), min_tokens=10,
        stop_token_ids=(5, 6, 7, 8), logprobs=3,
    ),
}  # fmt: skip


@cache
def runner(**config):
    return tiny_runner(max_num_batched_tokens=64, num_kv_blocks=400, deterministic=True, **config)


@cache
def noisy_runner(noise, **config):
    model = tiny_runner(max_num_batched_tokens=64, num_kv_blocks=400, is_draft=True, **config)
    norm = model.decoder.final_norm
    norm *= 1 + noise * torch.randn(norm.shape, generator=torch.Generator().manual_seed(1)).to(norm.device)
    return model


def answers(params, count, speculation=None, seed=0, predictions=None, **config):
    """Tokens and log-probabilities of `count` requests with repetitive prompts; and how many guesses were right."""
    model = runner(**config)
    model.reset()
    core = build_engine(model.config, model.info, InProcess(model), speculation)
    rng, got, logprobs, accepted = np.random.default_rng(seed), {}, {}, 0
    for i in range(count):
        phrase = rng.integers(2, TINY.vocab_size, rng.integers(2, 9)).tolist()
        prompt = (phrase * 9)[: int(rng.integers(1, 40))]
        prediction = tuple((predictions or {}).get(str(i), ()))
        core.add(Request(str(i), prompt, len(prompt), params, seed=i, prediction=prediction))
        got[str(i)] = []
    while core.has_work:
        if (output := core.step()) is None:
            continue
        for i, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
            got[state.request.request_id].append(token)
            if i in output.logprobs:
                found = output.logprobs[i]
                name, at = state.request.request_id, len(got[state.request.request_id])
                values = [found.logprob, *(value for _, value in found.top)]
                logprobs |= {(name, at, j): value for j, value in enumerate(values)}
        accepted += sum(verified.num_accepted for _, verified in output.reports)
    return got, logprobs, accepted


def model_draft(noise, ahead, **config):
    """A drafter with a model of its own: the target's weights, with `noise` in the last norm."""
    model = noisy_runner(noise, **config)
    model.reset()
    client = DraftClient(TINY.vocab_size, time.monotonic)
    client.attach(LocalWire(whole_draft(model.config, model.info, InProcess(model), ahead)), ((1, 0.1), (64, 0.1)))
    return client


RECORDED = ((3, 0.0), (4, 0.7), (7, 0.9), (None, 0.8))  # guesses, and the share of them that is right
MODELS = ((1, 0.0, 0), (2, 0.3, 1), (5, 2.0, 9), (6, 0.0, 1), (8, 0.3, 9), (None, 0.3, 1))  # guesses, noise, ahead


@pytest.mark.one_in(2)
@pytest.mark.long
@pytest.mark.parametrize("name", SAMPLING)
def test_guesses_change_no_token(name):
    """Half of the drafters with each way of sampling, alternately one prompt at a time or 32."""
    turn = list(SAMPLING).index(name) % 2
    batch, count = ((1, 3), (32, 24))[turn]
    params, config = SAMPLING[name], {"max_num_seqs": batch}
    want, logprobs, _ = answers(params, count, **config)
    for most, share_right in RECORDED[turn::2]:
        drafter = Recorded(want, share_right, TINY.vocab_size)
        got, scored, accepted = answers(params, count, Speculation(drafter, most, ((1, 1.0), (64, 2.0)), 0.0), **config)
        assert got == want, (most, share_right)
        assert scored == logprobs
        assert accepted > 0 or share_right == 0.0
    for most, noise, ahead in MODELS[turn::2]:
        draft = model_draft(noise, ahead, **config)
        got, scored, accepted = answers(params, count, Speculation(draft, most, ((1, 1e3), (64, 2e3)), 0.0), **config)
        assert got == want, (most, noise, ahead)
        assert scored == logprobs
        assert draft.num_late == 0
        assert accepted > 0 or noise == 2.0
    if turn == 0:
        got, _, accepted = answers(params, count, Speculation(Ngram(), 4, (), 0.0), **config)
        assert got == want
        assert accepted > 0 or params.temperature


@pytest.mark.long
def test_tight_memory_and_small_steps():
    """Guesses beside preemptions and chunks: never at the cost of others' blocks."""
    config = {
        "num_kv_blocks": 34,
        "max_model_len": 106,
        "max_num_batched_tokens": 11,
        "max_num_seqs": 6,
        "block_size": 4,
    }
    params = SamplingParams(max_tokens=64, temperature=0.9, stop_token_ids=(130,))
    want, _, _ = answers(params, 24)
    drafter = Recorded(want, 0.8, TINY.vocab_size)
    model = tiny_runner(deterministic=True, **config)
    core = build_engine(model.config, model.info, InProcess(model), Speculation(drafter, 5, (), 0.0))
    core.extras[Admission].lengths = FixedShare(0.1)
    assert core.depth == 2
    rng, got = np.random.default_rng(0), {}
    for i in range(24):
        phrase = rng.integers(2, TINY.vocab_size, rng.integers(2, 9)).tolist()
        prompt = (phrase * 9)[: int(rng.integers(1, 40))]
        core.add(Request(str(i), prompt, len(prompt), params, seed=i))
    while core.has_work:
        if (output := core.step()) is not None:
            for state, token in zip(output.states, output.token_ids, strict=True):
                got.setdefault(state.request.request_id, []).append(token)
    assert got == want
    assert core.scheduler.stats.preemptions > 0


@pytest.mark.long
@pytest.mark.thorough
def test_the_distribution_is_that_of_the_target():
    """First two tokens of 3,000 requests that differ in their seeds alone, against the model's own probabilities."""
    params = SamplingParams(max_tokens=3, temperature=1.0, top_k=5, ignore_eos=True)
    prompt, model = [7, 11, 7, 11, 7], runner(max_num_seqs=32)

    def draw(speculation, first):
        model.reset()
        core, counts = build_engine(model.config, model.info, InProcess(model), speculation), {}
        for i in range(3000):
            core.add(Request(str(i), prompt, len(prompt), params, seed=first + i))
        while core.has_work:
            if (output := core.step()) is not None:
                for state, _ in output.finished:
                    pair = tuple(state.tokens[len(prompt) : len(prompt) + 2])
                    counts[pair] = counts.get(pair, 0) + 1
        return counts

    plain, guessed = draw(None, 0), draw(Speculation(Constant(), 3, (), 0.0), 1 << 40)
    pairs = [pair for pair, count in plain.items() if count >= 40]
    observed = np.array([guessed.get(pair, 0) for pair in pairs], float)
    expected = np.array([plain[pair] for pair in pairs], float)
    # Both are samples: the variance of a difference is the sum of the two.
    statistic = ((observed - expected) ** 2 / (observed + expected)).sum()
    assert statistic < len(pairs) + 4 * (2 * len(pairs)) ** 0.5, (statistic, len(pairs))


class Constant(Drafter):
    """A Drafter that always guesses the same token, like a draft with a favourite."""

    def guess(self, state, most):
        return [11, 7, 11][:most]

    def forget(self, state):
        pass


def choosing(drafter, rate, step_us, latency_us):
    """A policy without a clock. All its rates are the same."""
    speculation = Speculation(drafter, None, step_us, latency_us)
    speculation.acceptance[0].rates = [rate] * 15
    return speculation


def states(count):
    return [type("State", (), {"max_len": 1000, "num_total": 50})() for _ in range(count)]


def test_the_count_follows_acceptance_and_cost():
    counts, (state,) = [], states(1)
    for rate in (0.0, 0.2, 0.5, 0.8, 0.99):
        cheap = choosing(Constant(), rate, ((1, 100.0), (8, 110.0), (64, 300.0), (512, 2000.0)), 10.0)
        cheap.choose_k([state])
        counts.append(cheap.round_count)
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == 7, "and the known token make eight rows"
    cheap.acceptance[0].rates = [0.5] * 15
    cheap.acceptance[0].chances()
    assert cheap._count(state) == 3, "what is right once in sixteen times is not worth a row"
    state.max_len = 52
    assert cheap._count(state) == 1, "nothing is verified after the last token"
    cheap.acceptance[0].rates = [0.8] * 15
    cheap.choose_k(states(256))
    assert cheap.round_count == 0, "a large batch does not gain"
    slow = choosing(Constant(), 0.8, ((1, 100.0), (8, 110.0)), 1000.0)
    slow.choose_k([state])
    assert slow.round_count == 0, "nor does one whose steps would no longer overlap"


def test_a_run_of_wrong_guesses_does_not_end_a_good_draft():
    class Costly(Constant):
        def step_us(self, num_rows):
            return 730.0

    speculation, (state,) = choosing(Costly(), 0.8, ((1, 3700.0), (8, 4000.0)), 2200.0), states(1)
    for _ in range(1000):
        speculation.acceptance[0].record(state, 0, True)
    speculation.acceptance[0].rates = [0.8] * 15

    def is_guessed_for():
        speculation.choose_k([state])
        return speculation.round_count > 0

    assert is_guessed_for()
    while is_guessed_for():
        speculation.on_verified(state, 0, True)
    assert any(is_guessed_for() for _ in range(100))


def test_a_request_that_rests_alone_is_tried_again():
    """Rounds go on for its batch, because one more row is free here."""
    speculation, (good, bad) = choosing(Constant(), 0.5, ((1, 100.0), (64, 100.0)), 0.0), states(2)
    speculation.acceptance[0]._offsets.update({good: 0.4, bad: -0.5})
    counts = []
    for _ in range(100):
        speculation.choose_k([good, bad])
        assert speculation.round_count > 0
        counts.append(speculation._count(bad))
    assert counts[0] == 0
    assert counts[-1] > 0


def test_rates_are_learned_by_position():
    acceptance, (state, other) = Acceptance(0.7), states(2)
    for _ in range(300):
        for position, right in ((0, True), (1, True), (2, False)):
            acceptance.record(state, position, right)
    assert [round(chance, 1) for chance in acceptance.chances()[:4]] == [1.0, 1.0, 0.0, 0.7]
    assert acceptance.num_likely(other) == 2, "a new request has what others have shown"
    for _ in range(50):
        acceptance.record(other, 0, False)
    assert acceptance.chances([other])[0] < acceptance.chances([state])[0] - 0.3
    acceptance.forget(other)
    assert acceptance.chances([other]) == acceptance.chances()


def test_a_prediction_changes_no_token_and_is_guessed():
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    want, _, _ = answers(params, 2)
    wrong = {name: [*tokens[:9], 1, 1, 1, *tokens[9:]] for name, tokens in want.items()}
    accepted = {}
    for name, predictions in (("none", None), ("right", want), ("partly", wrong)):
        got, _, accepted[name] = answers(params, 2, Speculation(Ngram(), 4, (), 0.0), predictions=predictions)
        assert got == want, name
    assert accepted["right"] > accepted["none"]
    assert accepted["partly"] > accepted["none"]


def test_ngram_looks_up_the_next_tokens():
    from runtime.core.request_state import RequestState

    def state(tokens, prediction=()):
        request = Request("r", tokens, len(tokens), SAMPLING["greedy"], prediction=prediction)
        return RequestState(request, array("i", tokens), 99, frozenset(), (0, 0, 0))

    ngram = Ngram()
    assert ngram.guess(state([1, 2, 3, 4, 5, 6, 2, 3]), 3) == [4, 5, 6]
    ngram.forget(state([0]))
    assert ngram.guess(state([9, 1, 2, 1, 2, 1]), 5) == [2, 1, 2, 1, 2], "a repetition runs on into its own guesses"
    ngram.forget(state([0]))
    assert ngram.guess(state([1, 2, 3]), 4) is None
    known = state([5, 6, 7, 8, 1, 1])
    ngram.forget(known)
    assert ngram.guess(known, 2) is None
    known.tokens.extend([5, 6])
    assert ngram.guess(known, 2) == [7, 8], "tokens that came later are found too"
    ngram.forget(known)
    known = state([1, 2], prediction=(3, 4, 5, 6, 7))
    assert ngram.guess(known, 3) == [3, 4, 5], "an output begins as it is predicted to"
    known.tokens.extend([3, 9])
    assert ngram.guess(known, 3) is None
    known.tokens.extend([4, 5])
    assert ngram.guess(known, 2) == [6, 7], "and is found again after it went another way"


def test_the_true_cost_of_rounds_is_learned():
    """A round that takes long beyond all estimates is given up, by size of the batch, and tried again later."""
    now = [0.0]
    speculation = Speculation(Constant(), None, ((1, 1000.0), (64, 1500.0), (512, 4000.0)), 50.0, lambda: now[0])
    speculation.acceptance[0].rates = [0.8] * 15

    def step(rows, round_us, plain_us):
        speculation.choose_k(states(rows))
        count = speculation.round_count
        now[0] += (round_us if count else plain_us) / 1e6
        speculation.observe_step(DecodeShape(rows, rows * (1 + count), count))
        return count > 0

    assert all(step(1, 1300.0, 1000.0) for _ in range(100))
    assert all(step(1, 1e6, 1000.0) for _ in range(2)), "a pause now and then is no reason"
    large = [step(48, 9000.0, 1400.0) for _ in range(3000)]
    assert sum(large[:20]) >= 1
    assert 1 <= sum(large[1000:]) <= 60, "tried again, but rarely"
    assert all(step(1, 1300.0, 1000.0) for _ in range(100)), "another size of the batch is another matter"


def test_steps_beside_a_busy_draft_are_not_measured():
    """They are slow because the draft shares their GPU: rounds do not pay by that."""

    class Busy(Constant):
        def is_busy(self):
            return True

    now = [0.0]
    speculation = Speculation(Busy(), None, ((1, 3700.0), (64, 5100.0), (128, 6100.0)), 5000.0, lambda: now[0])
    speculation.acceptance[0].rates = [0.8] * 15
    for _ in range(100):
        speculation.choose_k(states(64))
        assert speculation._best == 0
        now[0] += 0.02
        speculation.observe_step(DecodeShape(64, 64, 0))
    assert speculation.stats()["step_overhead_us"] == 0
