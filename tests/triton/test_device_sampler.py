"""The kernels of a step's two ends and the device sampler, against their torch twins."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.types import Grammar, SamplingParams
from runtime.core.plan import NewSlot
from runtime.kernels.sampling.sample import PENALISED_FROM, PROMPT_LEN, SEED_HIGH, SEED_LOW, TEMPERATURE, TOP_K
from runtime.worker.gpu.device_sampler import DeviceSampler
from runtime.worker.gpu.transfers import Transfers
from tests.support.kernels import device_sampler_cases, drawn_logprob_cases, split_sampler_cases
from tests.support.kernels.device_sampler_cases import CPU, EOS


def test_slots_set_their_sampling_state():
    sampler = DeviceSampler(4, 100, (EOS,), Transfers(CPU))
    known = np.arange(5, dtype=np.int32)
    hot = SamplingParams(temperature=0.5, max_tokens=9, min_tokens=3, logit_bias=((100, 1.0),), stop_token_ids=(200,))
    requests = (hot, SamplingParams(temperature=0.0, top_k=7), SamplingParams(top_k=7), SamplingParams(logprobs=0))
    rows = [sampler.add(NewSlot(i, known, 4, (5 << 32) + 7, params)) for i, params in enumerate(requests)]
    assert rows[0].dtype == np.int32
    assert rows[0].view(np.float32)[TEMPERATURE] == 0.5
    assert rows[0][[SEED_LOW, SEED_HIGH, TOP_K, PROMPT_LEN]].tolist() == [7, 5, 0, 4]
    assert rows[2][TOP_K] == 7

    def is_plain(slot: int, position: int) -> bool:
        return sampler.is_plain(np.array([slot], np.int32), np.array([position], np.int32))

    assert [is_plain(0, position) for position in (5, 6, 7)] == [False, False, True]  # the 4th output token is free
    assert [is_plain(slot, 5) for slot in (1, 2, 3)] == [True, True, False]  # filters are a part of every sample
    assert sampler.filtered[:4].tolist() == [False, False, True, False]  # greedy rows do not need them
    assert not sampler.is_plain(np.array([1, 3], np.int32), np.array([5, 5], np.int32))
    sampler.remove(0)
    sampler.add(NewSlot(0, known, 4, 0, SamplingParams()))
    assert is_plain(0, 5)


@pytest.mark.parametrize(
    ("others", "first"),
    [
        ({}, 1),
        ({"min_tokens": 3}, 7),  # held tokens are sampled again, from the model's own logits
        ({"min_tokens": 3, "ignore_eos": True}, 1),
        ({"logit_bias": ((100, 1.0),)}, 1),  # of a token that the model does not have
        ({"logit_bias": ((9, 1.0),)}, 0),
        ({"logprobs": 0}, 0),  # of the model's own logits
        ({"grammar": Grammar("", "", "")}, 0),
    ],
)
def test_the_penalty_pass(others, first):
    sampler = DeviceSampler(4, 100, (EOS,), Transfers(CPU))
    known = np.arange(5, dtype=np.int32)
    penalised = SamplingParams(max_tokens=9, repetition_penalty=1.1, **others)
    assert sampler.add(NewSlot(0, known, 4, 0, penalised))[PENALISED_FROM] == first
    wanting = [bool(sampler.wants_second_pass(np.array([0]), np.array([at]))[0]) for at in (5, 6, 7, 8)]
    assert wanting == [not first or at < first for at in (5, 6, 7, 8)]
    assert sampler.add(NewSlot(0, known, 4, 0, SamplingParams(max_tokens=9, **others)))[PENALISED_FROM] == 0


@pytest.mark.parametrize(
    "check",
    [
        "check_masks",
        "check_scatter_writes",
        "check_graph_io",
        "check_inputs",
        "check_sample",
        "check_filters",
        "check_penalties",
        "check_sampler",
    ],
)
@pytest.mark.thorough
def test_twins_agree(check: str):
    getattr(device_sampler_cases, check)()


@settings(max_examples=15)
@given(st.lists(drawn_logprob_cases.drawn_params, min_size=2, max_size=4), st.integers(0, 1 << 30))
def test_drawn_log_probabilities_equal_a_plain_softmax(params, seed):
    drawn_logprob_cases.check_definition(params, seed, drawn_logprob_cases.Rows.on_device)


def test_drawn_log_probabilities_equal_those_of_the_host():
    drawn_logprob_cases.check_twins()


@pytest.mark.thorough
def test_ranks_with_parts_of_the_vocabulary_act_as_one():
    split_sampler_cases.check_split_sampler()
