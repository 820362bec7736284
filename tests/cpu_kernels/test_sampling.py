"""Draws and filters of compiled kernels choose the tokens of their torch twins."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.kernels.cpu.sampling.draw import TILE, draw
from runtime.kernels.cpu.sampling.filters import top_k_top_p_bounds
from runtime.kernels.llvm.launcher import Launcher
from runtime.kernels.sampling.token_keys import FAILED, drawn_keys_torch, tokens_of_keys_torch
from runtime.kernels.sampling.top_k_top_p import Filters, top_k_top_p_bounds_torch
from tests.support.kernels.compiled import call, targets

TARGETS = pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)


def keys_of(logits, temperatures, seeds, positions, target, first=0, checked=True, parts=1):
    num_rows, vocab = logits.shape
    keys = torch.zeros(num_rows, -(-vocab // TILE), dtype=torch.int64)
    sizes = num_rows, vocab, logits.stride(0), first
    call(draw, (logits, temperatures, seeds, positions, keys, *sizes), target, parts, checked=checked)
    return keys.amax(1)


@TARGETS
@given(
    vocab=st.sampled_from([1, 7, 16, 262, 1000, 4096, 9001]), rows=st.integers(1, 4),
    shift=st.sampled_from([0, -50, 9]), seed=st.integers(0, 999), parts=st.integers(1, 3), first=st.just(5000),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_draws_choose_the_tokens_of_their_twin(target, vocab, rows, shift, seed, parts, first):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3 + shift
    temperatures = torch.tensor([0.0, 1.0, 0.5, 2.0])[:rows]
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    positions = torch.arange(rows, dtype=torch.int32) * 7
    got = tokens_of_keys_torch(keys_of(logits, temperatures, seeds, positions, target, first, True, parts))
    want = tokens_of_keys_torch(drawn_keys_torch(logits, temperatures, seeds, positions, first, True))
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_only_a_row_that_is_not_finite_fails(wrong):
    logits = torch.randn(3, 5000)
    logits[1, 4999] = wrong
    rows = torch.zeros(3), torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int32)
    keys = keys_of(logits, *rows, targets()[0])
    assert (keys == FAILED).tolist() == [False, True, False]
    unchecked = tokens_of_keys_torch(keys_of(logits, *rows, targets()[0], checked=False))
    assert unchecked[::2].tolist() == logits.argmax(1)[::2].tolist()


def test_masked_tokens_are_never_drawn():
    logits = torch.full((1, 262), -math.inf)
    logits[0, 200] = -40.0
    for temperature in (0.0, 1.0):
        rows = torch.tensor([temperature]), torch.tensor([3]), torch.tensor([8], dtype=torch.int32)
        assert tokens_of_keys_torch(keys_of(logits, *rows, targets()[0], checked=False)).tolist() == [200]


def test_equal_logits_give_the_lowest_id():
    logits = torch.zeros(1, 9000)
    rows = torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32)
    assert tokens_of_keys_torch(keys_of(logits, *rows, targets()[0])).tolist() == [0]


@example(vocab=9001, scale=4.598, seed=806, top_k=0, top_p=0.9999, min_p=0.0, masked=False)  # 16 tokens differ
@given(
    vocab=st.sampled_from([2, 40, 1000, 9001]), scale=st.floats(0.1, 8), seed=st.integers(0, 999),
    top_k=st.sampled_from([0, 1, 5, 50, 2000]), top_p=st.sampled_from([1.0, 0.0, 0.3, 0.9, 0.9999]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]), masked=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_filters_keep_the_tokens_of_their_twin(vocab, scale, seed, top_k, top_p, min_p, masked):
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    if masked:
        logits[:, 1::3] = -math.inf
    filters = Filters(torch.tensor([top_k, 0]), torch.tensor([top_p, 1.0]), torch.tensor([min_p, 0.0]))
    got, want = (bounds(logits, filters) for bounds in (_compiled, top_k_top_p_bounds_torch))
    kept, kept_by_twin = (logits >= bounds[:, None] for bounds in (got, want))
    differ = kept != kept_by_twin
    # Sums of masses round differently, so the last token of a nucleus may differ, or several that are very unlikely.
    masses = (logits.double().softmax(1) * differ).sum(1)
    assert (masses[differ.sum(1) > (vocab > 2 and top_p < 1.0)] < 1e-5).all()
    assert top_p < 1.0 or not differ.any()


def _compiled(*arguments):
    return top_k_top_p_bounds(Launcher(), *arguments)
