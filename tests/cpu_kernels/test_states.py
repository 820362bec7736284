"""Compiled kernels of layers with states: their values, and a token's bits in any row of any step."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.compiled import targets
from tests.support.kernels.compiled_states import compiled
from tests.support.kernels.state_histories import LAYERS, Request, Twins, played, requests

EACH_LAYER = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
REQUESTS = st.lists(requests(), min_size=1, max_size=3)


@pytest.mark.one_in(3)
@EACH_LAYER
@given(given_requests=REQUESTS)
@settings(max_examples=12)
def test_values_equal_those_of_the_twin(layer, given_requests):
    with compiled() as operations:
        got = played(layer, given_requests, operations)
    want = played(layer, given_requests, Twins)
    for a, b in zip(chain(*got), chain(*want), strict=True):
        if layer.kind == "short_conv":
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5 * float(b.abs().max()))


@pytest.mark.one_in(3)
@EACH_LAYER
@given(given_requests=REQUESTS, parts=st.integers(1, 5))
@settings(max_examples=12)
def test_bits_do_not_depend_on_rows(layer, given_requests, parts):
    with compiled(parts=parts) as operations:
        got = played(layer, given_requests, operations)
    with compiled() as operations:
        want = played(layer, [request.alone() for request in given_requests], operations, rows_per_step=1)
    assert all(torch.equal(a, b) for a, b in zip(chain(*got), chain(*want), strict=True))


@EACH_LAYER
def test_each_instruction_set_gives_the_same_bits(layer):
    given_requests = [Request(100, [(64, 64), (36, 36), (9, 4), (1, 1)], 64), Request(1, [(1, 1)] * 5)]
    results = []
    for target in targets():
        with compiled(target) as operations:
            results.append(list(chain(*played(layer, given_requests, operations))))
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@EACH_LAYER
@pytest.mark.parametrize("column", [0, -1])
def test_faults_stay_with_their_request(layer, column):
    """The cache holds NaN before the first row."""
    given_requests = [Request(70, [(64, 64), (6, 6), (3, 2)]), Request(5, [(4, 4), (1, 1), (2, 2)])]
    with compiled() as operations:
        whole, _ = played(layer, given_requests, operations)
        (bad, good), _ = played(layer, [replace(given_requests[0], fault=(65, column)), given_requests[1]], operations)
    assert torch.equal(good, whole[1])
    assert torch.equal(bad[:65], whole[0][:65])
    assert not bad[65].isfinite().all()
