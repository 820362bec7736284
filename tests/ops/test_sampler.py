"""Sampling: noise by position, filters and penalties against plain definitions, rows independent of each other."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.types import SamplingParams
from runtime.core.plan import NewSlot
from runtime.kernels.sampling.gumbel import gumbel_noise, noise_bits, noise_keys
from runtime.kernels.sampling.logprobs import token_logprobs
from runtime.kernels.sampling.penalties import penalise_torch
from runtime.kernels.sampling.sample import FREQUENCY, NUM_PARAMS, PRESENCE, PROMPT_LEN, REPETITION
from runtime.kernels.sampling.top_k_top_p import Filters, top_k_top_p_bounds_torch
from runtime.worker.cpu.sampler import Sampler
from runtime.worker.cpu.slots import Slots

CPU = torch.device("cpu")
EOS = 2


# ---- noise --------------------------------------------------------------------------------------------------------


def mix(h: int, key: int) -> int:
    """lowbias32 with a key in the middle, on Python integers."""
    h = ((h ^ h >> 16) * 0x7FEB352D & 0xFFFFFFFF) ^ key
    h = (h ^ h >> 15) * 0x846CA68B & 0xFFFFFFFF
    return h ^ h >> 16


def plain_bits(seed: int, position: int, token: int) -> int:
    low, high = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    first = mix(mix(position ^ low, 0) ^ high, 0x9E3779B9)
    second = mix(first ^ low, 0)
    return mix(token ^ first, second) >> 9


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1), st.lists(st.integers(0, 300_000), min_size=1, max_size=20))
def test_noise_bits_equal_the_definition_in_plain_integers(seed, position, tokens):
    keys = noise_keys(torch.tensor([seed]), torch.tensor([position], dtype=torch.int32))
    got = noise_bits(keys, torch.tensor(tokens, dtype=torch.int32))
    assert got.tolist() == [plain_bits(seed, position, t) for t in tokens]


def test_noise_is_the_same_alone_and_among_others():
    seeds, positions = torch.tensor([5, 2**62 + 1, 5]), torch.tensor([0, 9, 10], dtype=torch.int32)
    ids = torch.arange(1000, dtype=torch.int32)
    together = gumbel_noise(noise_keys(seeds, positions)[:, :, None], ids)
    for row in range(3):
        alone = gumbel_noise(noise_keys(seeds[row : row + 1], positions[row : row + 1]), ids[500:])
        assert torch.equal(alone, together[row, 500:])


def test_extreme_bits_give_finite_noise():
    u = (torch.tensor([0, (1 << 23) - 1]).float() + 0.5) * 2.0**-23
    noise = -torch.log(-torch.log1p(-u))
    assert noise.isfinite().all()
    assert 16 < noise[0] < 17
    assert -3 < noise[1] < -2


def chi_square(counts: torch.Tensor) -> float:
    """How many standard deviations a count table's chi-square lies above its mean, under equal expectations."""
    expected = counts.sum() / counts.numel()
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


# The inputs that vary: neighbouring tokens, positions, seeds, and seeds that differ in high bits only.
WALKS = {
    "tokens": lambda n: (torch.tensor([7]), torch.tensor([3]), torch.arange(n)),
    "positions": lambda n: (torch.full((n,), 7), torch.arange(n), torch.tensor([11])),
    "seeds": lambda n: (torch.arange(n), torch.full((n,), 3), torch.tensor([11])),
    "high seeds": lambda n: (torch.arange(n) << 40, torch.full((n,), 3), torch.tensor([11])),
}


def walk_bits(name: str, n: int) -> torch.Tensor:
    seeds, positions, tokens = WALKS[name](n)
    return noise_bits(noise_keys(seeds, positions.int()), tokens.int())


@pytest.mark.parametrize("walk", WALKS)
def test_noise_is_uniform_and_serially_independent(walk):
    bits = walk_bits(walk, 1 << 18)
    for shift in (0, 7, 15):  # low, middle and high 8 of the 23 bits
        assert abs(chi_square(torch.bincount(bits >> shift & 255, minlength=256).double())) < 5
    for lag in (1, 2, 64):
        pairs = (bits[:-lag] >> 18 << 5) + (bits[lag:] >> 18)
        assert abs(chi_square(torch.bincount(pairs, minlength=1024).double())) < 5


def test_rows_with_close_keys_do_not_share_noise():
    ids = torch.arange(1 << 16, dtype=torch.int32)
    seeds = torch.tensor([0, 0, 1, 1, 1 << 32, 1 << 62])
    positions = torch.tensor([0, 1, 0, 1, 0, 0], dtype=torch.int32)
    keys = noise_keys(seeds, positions)[:, :, None]
    noise = gumbel_noise(keys, ids)
    correlation = torch.corrcoef(noise) - torch.eye(len(seeds))
    assert correlation.abs().max() < 5 / math.sqrt(len(ids))
    values = noise_bits(keys, ids).sort(-1).values
    for a in range(len(seeds)):  # nor are they permutations of each other
        for b in range(a):
            assert (values[a] == values[b]).float().mean() < 0.01


def test_gumbel_max_draws_from_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -5.0, 1.5])
    n = 200_000
    keys = noise_keys(torch.full((n,), 123), torch.arange(n, dtype=torch.int32))
    noise = gumbel_noise(keys[:, :, None], torch.arange(6, dtype=torch.int32))
    drawn = torch.bincount((logits + noise).argmax(-1), minlength=6)
    expected = logits.double().softmax(0) * n
    assert float(((drawn - expected) ** 2 / expected).sum()) < 30  # chi-square with 5 degrees of freedom


# ---- filters and penalties ----------------------------------------------------------------------------------------


def plain_survivors(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """By definition, on distinct logits."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    kept = order[:top_k] if top_k else order
    total = sum(math.exp(logits[i]) for i in kept)
    nucleus, mass = [], 0.0
    for i in kept:
        if mass >= top_p and top_p < 1:
            break
        nucleus.append(i)
        mass += math.exp(logits[i]) / total
    floor = min_p * math.exp(logits[order[0]])
    return {i for i in nucleus if math.exp(logits[i]) >= floor}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 1, 3, 50, 5000]), st.sampled_from([1.0, 0.9, 0.5, 0.01, 0.999]),
                  st.sampled_from([0.0, 0.1, 0.9])),
        min_size=1, max_size=4,
    ),
    st.sampled_from([8, 100, 3000]), st.integers(0, 10_000), st.sampled_from([0.1, 3.0]),
)  # fmt: skip
def test_filters_equal_their_definition(rows, vocab, seed, spread):
    torch.manual_seed(seed)
    logits = torch.stack([torch.randperm(vocab).float().div(vocab).sub(0.5).mul(4 * spread) for _ in rows])
    bounds = top_k_top_p_bounds_torch(logits, Filters(*map(torch.tensor, zip(*rows, strict=True))))
    for row, filters in enumerate(rows):
        got = set((logits[row] >= bounds[row]).nonzero().flatten().tolist())
        want = plain_survivors(logits[row].tolist(), *filters)
        assert len(got ^ want) <= (0.0 < filters[1] < 1.0)  # fp32 may fall on the other side of top_p's edge
        assert got
        alone = top_k_top_p_bounds_torch(
            logits[row : row + 1], Filters(*(torch.tensor([f]) for f in filters))
        )  # independent of the other rows
        assert torch.equal(alone, bounds[row : row + 1])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_penalties_equal_their_definition(seed):
    rng = np.random.default_rng(seed)
    n, vocab = 3, 12
    logits = torch.from_numpy(rng.normal(size=(n, vocab)).astype(np.float32))
    tokens = rng.integers(0, vocab, (n, 9)).astype(np.int32)
    known, prompt = rng.integers(1, 10, n), np.zeros(n, np.int64)
    prompt[:] = [rng.integers(1, k + 1) for k in known]
    repetition, frequency, presence = (rng.uniform(low, 2, n).astype(np.float32) for low in (0.5, -2, -2))
    want = logits.tolist()
    for i in range(n):
        for t in set(tokens[i, : known[i]].tolist()):
            want[i][t] *= 1 / repetition[i] if want[i][t] > 0 else repetition[i]
        output = tokens[i, prompt[i] : known[i]].tolist()
        for t in set(output):
            want[i][t] -= output.count(t) * frequency[i] + presence[i]
    params = np.zeros((n, NUM_PARAMS), np.int32)
    params[:, PROMPT_LEN] = prompt
    for column, values in ((REPETITION, repetition), (FREQUENCY, frequency), (PRESENCE, presence)):
        params.view(np.float32)[:, column] = values
    slots, positions = torch.arange(n, dtype=torch.int32), torch.from_numpy(known).int()
    penalise_torch(logits, slots, positions, torch.from_numpy(tokens), torch.from_numpy(params), all_rows=True)
    torch.testing.assert_close(logits, torch.tensor(want))


def test_logprobs_of_the_raw_distribution():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    own, ranks, top_ids, top = token_logprobs(logits, torch.tensor([2]), 3)
    want = logits.double().log_softmax(-1)[0]
    assert own.item() == pytest.approx(want[2].item())
    assert ranks.tolist() == [2]
    assert top_ids.tolist() == [[1, 2, 0]]
    assert top[0].tolist() == pytest.approx(want[[1, 2, 0]].tolist())


# ---- the sampler --------------------------------------------------------------------------------------------------


def open_slots(vocab: int, requests: list[tuple[list[int], int, int, SamplingParams]]) -> tuple[Sampler, Slots]:
    """Slot i is request i: (known tokens, prompt_len, seed, params)."""
    sampler, slots = Sampler(len(requests), vocab, (EOS,), CPU), Slots(len(requests), 64, 4, CPU)
    for i, (tokens, prompt_len, seed, params) in enumerate(requests):
        new = NewSlot(i, np.array(tokens, np.int32), prompt_len, seed, params)
        sampler.add(new)
        slots.add(new)
    return sampler, slots


def sample(sampler: Sampler, slots: Slots, logits: torch.Tensor, rows: list[int], positions: list[int]):
    return sampler.sample(logits, np.array(rows, np.int32), np.array(positions, np.int32), slots)


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(32),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.5]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, -0.5]),
    allowed_token_ids=st.sampled_from([(), (), (3, 1, 6, 19)]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (7, -100.0)), ((20, 1.0),)]),
    min_tokens=st.sampled_from([0, 4]),
    stop_token_ids=st.sampled_from([(), (5, 6), (2**31 - 1,)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 19), min_size=1, max_size=9), st.integers(0, 2**63 - 1), PARAMS),
                min_size=1, max_size=6), st.integers(0, 999))  # fmt: skip
def test_a_row_is_sampled_the_same_alone_and_among_others(requests, seed):
    torch.manual_seed(seed)
    requests = [(tokens, 1 + s % len(tokens), s, params) for tokens, s, params in requests]
    sampler, slots = open_slots(20, requests)
    logits, positions = torch.randn(len(requests), 20) * 3, [len(r[0]) for r in requests]
    ids, logprobs = sample(sampler, slots, logits.clone(), list(range(len(requests))), positions)
    wanted = [i for i, r in enumerate(requests) if r[3].logprobs is not None]
    assert (logprobs.rows.tolist() if logprobs else []) == wanted
    for i, request in enumerate(requests):
        alone, own = sample(*open_slots(20, [request]), logits[i : i + 1].clone(), [0], positions[i : i + 1])
        assert alone.tolist() == ids[i : i + 1].tolist()
        if own:
            at = wanted.index(i)
            assert own.ranks[0] == logprobs.ranks[at]
            assert own.logprobs[0] == logprobs.logprobs[at]


def test_non_finite_rows_fail_alone():
    greedy, hot, choosy = SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_p=0.5, top_k=3)
    sampler, slots = open_slots(8, [([1], 1, 5, p) for p in (greedy, greedy, hot, hot, greedy, choosy)])
    logits, rows = torch.randn(6, 8), [0, 1, 2, 3, 4, 5]
    good = sample(sampler, slots, logits.clone(), rows, [1] * 6)[0].tolist()
    logits[1, 3], logits[3, 0], logits[4, 2], logits[5, 1] = math.nan, math.inf, -math.inf, math.nan
    bad = sample(sampler, slots, logits, rows, [1] * 6)[0].tolist()
    assert bad == [good[0], -1, good[2], -1, -1, -1]


def test_min_tokens_holds_back_eos_and_stop_ids():
    held = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(5,))
    free = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(5,), ignore_eos=True)
    sampler, slots = open_slots(8, [([1, 1], 2, 0, held), ([1, 1], 2, 0, free)])
    logits = torch.zeros(2, 8)
    logits[:, EOS], logits[:, 5], logits[:, 7] = 3.0, 2.0, 1.0
    for output_len, want in ((0, [7, EOS]), (2, [7, EOS]), (3, [EOS, EOS])):
        assert sample(sampler, slots, logits.clone(), [0, 1], [2 + output_len] * 2)[0].tolist() == want


def test_penalties_count_tokens_and_end_with_their_slot():
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    sampler, slots = open_slots(8, [([4, 4], 2, 0, params)])
    logits = torch.zeros(1, 8)
    logits[0, 4], logits[0, 6] = 1.0, 0.5
    first = sample(sampler, slots, logits.clone(), [0], [2])[0]
    assert first.tolist() == [4]  # in the prompt only: presence counts output
    slots.write_sampled(torch.tensor([2]), first)
    assert sample(sampler, slots, logits.clone(), [0], [3])[0].tolist() == [6]
    sampler.remove(0)
    sampler.add(NewSlot(0, np.array([4], np.int32), 1, 0, SamplingParams(temperature=0)))
    assert sample(sampler, slots, logits.clone(), [0], [3])[0].tolist() == [4]


def test_only_allowed_tokens_are_drawn():
    few = SamplingParams(temperature=0, allowed_token_ids=(2, 3), logprobs=1)
    drawn = SamplingParams(allowed_token_ids=(2, 3, 3), logit_bias=((1, 90.0),))
    # The only allowed token is drawn although min_tokens holds it back.
    held = SamplingParams(temperature=0, allowed_token_ids=(5,), min_tokens=3, max_tokens=4, stop_token_ids=(5,))
    sampler, slots = open_slots(8, [([1], 1, 9, few), ([1], 1, 9, held), *[([1], 1, i, drawn) for i in range(20)]])
    logits = torch.tensor([0.0, 5.0, 4.0, 4.0, 0.0, -9.0, 0.0, 0.0]).repeat(22, 1)
    ids, logprobs = sample(sampler, slots, logits, [*range(22)], [1] * 22)
    assert ids.tolist()[:2] == [2, 5]
    assert {*ids.tolist()[2:]} == {2, 3}
    assert logprobs.top_ids[0].tolist() == [1], "log-probabilities are the model's own"


def test_logit_bias_forces_and_bans():
    force, ban = SamplingParams(logit_bias=((3, 100.0),)), SamplingParams(temperature=0, logit_bias=((1, -100.0),))
    sampler, slots = open_slots(8, [([1], 1, 9, force), ([1], 1, 9, ban)])
    logits = torch.tensor([0.0, 5.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0]).repeat(2, 1)
    assert sample(sampler, slots, logits, [0, 1], [1, 1])[0].tolist() == [3, 2]
