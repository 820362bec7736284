"""The choice of experts on a GPU equals its torch twin."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts.moe_routing import RoutedExperts
from runtime.kernels.experts.moe_torch import Router, route_torch
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.norm.rms_norm import rms_norm_triton
from tests.support.kernels.routing_cases import distinct_logits, router_of, specs

LOGITS = Linear(torch.abs, rms_norm_triton, torch.abs)  # never called


@settings(max_examples=60, deadline=None)
@given(specs(), st.integers(1, 5), st.integers(0, 7), st.integers(0, 1 << 30))
def test_kernel_equals_twin(spec: ExpertsSpec, num_tokens: int, padding: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits = distinct_logits(spec, num_tokens, padding, generator)
    layer = RoutedExperts()
    layer.spec, layer.router = spec, router_of(spec, LOGITS, generator)
    ids, weights = layer._route(logits)
    want_ids, want = route_torch(logits, spec, layer.router.bias, layer.router.scales)
    assert torch.equal(ids.view(num_tokens, -1).long(), want_ids)
    torch.testing.assert_close(weights.view(num_tokens, -1), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [3, 20])
def test_logits_can_stay_in_float32(rows: int, deterministic: bool):
    x, weight = torch.randn(rows, 64).half(), torch.randn(24, 64).half()
    linear = FusedLinear(weight, None, "silu", deterministic)
    want = x.double() @ weight.double().T
    found = [Router(linear, is_wide=is_wide).logits_of(x, x, 1e-5) for is_wide in (False, True)]
    assert [logits.dtype for logits in found] == [torch.float16, torch.float32]
    exact = deterministic or rows == 3  # otherwise only cuBLAS keeps the sums
    assert not exact or (found[1] - want).norm() < 1e-6 * want.norm() < 1e-2 * (found[0] - want).norm()
