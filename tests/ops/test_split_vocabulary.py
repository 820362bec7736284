"""Ranks with the logits of parts of the vocabulary answer as one rank with all logits, to the bit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.types import Grammar, SamplingParams
from runtime.core.plan import NewSlot
from runtime.kernels.collectives.communicator import Communicator
from runtime.worker.cpu.sampler import Sampler
from runtime.worker.cpu.slots import Slots
from runtime.worker.ranks.split_logits import SplitLogits
from tests.ops.test_sampler import EOS, PARAMS
from tests.support.ranks.lockstep_ranks import LockstepGroup

CPU = torch.device("cpu")
MAX_LEN = 32
PLAIN = st.builds(SamplingParams, temperature=st.sampled_from([0.0, 0.7, 2.0]), seed=st.integers(0, 2**63 - 1))


def part_of(logits: torch.Tensor, ranks: Communicator) -> torch.Tensor:
    """A rank's columns."""
    ids = SplitLogits(logits.shape[1], ranks).own_ids
    return logits[:, ids.start : ids.stop].clone()


def equal(got, want) -> bool:
    """Tokens, and log-probabilities if there are any, to the bit."""
    if not torch.equal(got[0], want[0]) or (got[1] is None) != (want[1] is None):
        return False
    names = ("rows", "ranks", "logprobs", "top_ids", "top_logprobs")
    arrays = [[np.asarray(getattr(x[1], name)) for name in names] for x in (got, want)] if want[1] else ([], [])
    return all(np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(*arrays, strict=True))


def sampled(ranks: Communicator | None, logits: torch.Tensor, requests: list[tuple[list[int], SamplingParams]]):
    """One step of all requests."""
    vocab, n = logits.shape[1], len(requests)
    split = SplitLogits(vocab, ranks)
    sampler, slots = Sampler(n, vocab, (EOS,), CPU, split), Slots(n, MAX_LEN, 1, CPU)
    for i, (known, params) in enumerate(requests):
        new = NewSlot(i, np.array(known, np.int32), 1 + i % len(known), 7919 * i, params)
        sampler.add(new)
        slots.add(new)
    rows, positions = np.arange(n, dtype=np.int32), np.array([len(known) for known, _ in requests], np.int32)
    return sampler.sample(logits.clone() if ranks is None else part_of(logits, ranks), rows, positions, slots)


@settings(max_examples=60)
@given(st.data())
def test_every_rank_samples_as_one_does(data):
    size, vocab = data.draw(st.integers(2, 8)), data.draw(st.sampled_from([1, 2, 9, 20, 37, 300]))
    params = data.draw(st.sampled_from([PLAIN, PARAMS, st.one_of(PLAIN, PARAMS)]))
    known = st.lists(st.integers(0, vocab - 1), min_size=1, max_size=9)
    requests = data.draw(st.lists(st.tuples(known, params), min_size=1, max_size=5))
    torch.manual_seed(data.draw(st.integers(0, 999)))
    logits = torch.randn(len(requests), vocab) * 3
    if data.draw(st.booleans()):
        logits = logits.round()  # ties, also between ranks
    if (broken := data.draw(st.integers(0, 2 * len(requests)))) < len(requests):
        logits[broken, data.draw(st.integers(0, vocab - 1))] = data.draw(st.sampled_from([math.nan, math.inf]))
    want = sampled(None, logits, requests)
    assert (broken < len(requests)) == (want[0] < 0).any()
    for got in LockstepGroup(size).run(lambda ranks: sampled(ranks, logits, requests)):
        assert equal(got, want)


@pytest.mark.parametrize(
    ("params", "counts"),
    [
        ([SamplingParams(temperature=0.0, top_k=3), SamplingParams(temperature=0.5)], {"all_max": 1}),
        ([SamplingParams(temperature=0.0, min_tokens=2)], {"all_max": 1}),  # it has two
        ([SamplingParams(temperature=0.0), SamplingParams(top_p=0.9)], {"all_gather": 1}),
        ([SamplingParams(temperature=0.0, logprobs=0)], {"all_gather": 1}),
        ([SamplingParams(temperature=0.0, min_tokens=3)], {"all_gather": 1}),
        ([SamplingParams(presence_penalty=1.0)], {"all_gather": 1}),
        ([SamplingParams(grammar=Grammar("", "", "")), SamplingParams(logprobs=1)], {"all_gather": 1, "all_max": 1}),
    ],
)
def test_logits_are_gathered_only_for_rows_that_need_them(params, counts):
    group, requests = LockstepGroup(3), [([4, 5, 6], each) for each in params]
    group.run(lambda ranks: sampled(ranks, torch.randn(len(requests), 20), requests))
    assert [rank.counts for rank in group.ranks] == [counts] * 3
