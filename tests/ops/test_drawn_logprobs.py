"""Log-probabilities under the distribution that a token was drawn from, on the host."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.types import CallboardError, SamplingParams
from runtime.kernels.cpu.sampling.filters import top_k_top_p_bounds
from runtime.kernels.cpu_support import obstacle
from runtime.kernels.llvm.launcher import Launcher
from runtime.kernels.sampling.token_keys import drawn_keys_torch
from tests.support.kernels.drawn_logprob_cases import Rows, check_definition, drawn_params, varied


@settings(max_examples=150)
@given(st.lists(drawn_params, min_size=1, max_size=6), st.integers(0, 1 << 30))
def test_they_equal_a_plain_softmax_of_what_is_left(params, seed):
    check_definition(params, seed, Rows.on_host)


@pytest.mark.skipif(bool(obstacle()), reason=f"needs compiled kernels: {obstacle()}")
def test_compiled_filters_give_the_same_values():
    kernels = drawn_keys_torch, partial(top_k_top_p_bounds, Launcher())
    check_definition(varied(20), 5, lambda rows, slots: rows.on_host(slots, *kernels), vocab=5000)


def test_a_step_without_such_rows_has_none():
    rows = Rows([SamplingParams(max_tokens=20, logprobs=0)], 1)
    assert rows.on_host(np.zeros(1, np.int64))[1] == []


def test_they_need_log_probabilities():
    with pytest.raises(CallboardError, match="sampling_logprobs is True without logprobs"):
        SamplingParams(sampling_logprobs=True)
