"""Mixtures of few choices with dense weights equal their torch twin, for every kind of router."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts.moe_few_w16a16 import FewTiles, summed_columns
from runtime.kernels.experts.moe_torch import ExpertBiases, Experts, Router
from runtime.kernels.experts.moe_w16a16 import GroupedExperts
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.linear.skinny_gemm_configs import SkinnyGemmConfig
from runtime.kernels.norm.gated_activation import gated_activation_torch
from runtime.kernels.norm.rms_norm import rms_norm_torch, rms_norm_triton
from tests.support.kernels.routing_cases import distinct_logits, router_of, specs

ERRORS = {torch.float32: 5e-6, torch.float16: 5e-3}


@pytest.fixture(autouse=True)
def wide_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after another, so few programs have many rows."""
    monkeypatch.setattr("runtime.kernels.experts.moe_few_w16a16.TILES", TILES)


TILES = FewTiles(SkinnyGemmConfig(32, 16, 4, 2), SkinnyGemmConfig(16, 16, 4, 1))


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def mixture_error(
    spec: ExpertsSpec, routers: tuple[Router, Router], x: torch.Tensor, ffn: int, activation: Any, has_biases: bool,
    generator: torch.Generator,
) -> float:  # fmt: skip
    """The kernels' difference from the twin, as a share of the largest number. The first router is the twin's."""
    dtype, hidden = x.dtype, x.shape[1]
    sizes = (2 * ffn, hidden), (hidden, ffn)
    weights = [tuple((randn(generator, *s) / 5).to(dtype) for s in sizes) for _ in range(spec.all_experts)]
    biases = ExpertBiases()
    if has_biases:
        biases = ExpertBiases(*(randn(generator, spec.all_experts, size).to(dtype) for size in (2 * ffn, hidden)))
    norm = torch.rand(hidden, generator=generator).to(dtype)
    activate = partial(gated_activation_torch, activation=activation)
    plain = Experts(spec, routers[0], weights, lambda weight: partial(F.linear, weight=weight), activate)
    kernels = GroupedExperts(spec, routers[1], weights, activation, False)
    assert kernels._is_single(*x.shape, summed_columns())
    results, chosen = [], []
    for layer in (plain, kernels):
        layer.biases = biases
        layer.router.record = []
        results.append(torch.zeros_like(x))
        layer.add_to(x, norm, 1e-5, results[-1])
        chosen.append(layer.router.record[0].view(len(x), -1).long())
    assert torch.equal(*chosen)
    want, got = results
    return ((got - want).abs().max() / want.abs().max()).item()


@settings(max_examples=25, deadline=None)
@given(
    specs(), st.integers(1, 4), st.sampled_from((8, 24, 40)), st.sampled_from((5, 24)), st.booleans(),
    st.sampled_from(("silu", "gelu_tanh", "swiglu_clamped")), st.integers(0, 1 << 30),
)  # fmt: skip
def test_kernels_equal_twin(
    spec: ExpertsSpec, num_tokens: int, hidden: int, ffn: int, has_biases: bool, activation: str, seed: int
):
    generator = torch.Generator().manual_seed(seed)
    most = max(spec.all_experts // 2, spec.choices) // spec.choices
    x = randn(generator, min(num_tokens, most), hidden)
    logits = distinct_logits(spec, len(x), 3, generator)
    twin = router_of(spec, Linear(lambda x: logits, rms_norm_torch, torch.abs), generator)
    own = Router(Linear(lambda x: logits, rms_norm_triton, torch.abs), twin.bias, scales=twin.scales)
    error = mixture_error(spec, (twin, own), x, ffn, activation, has_biases, generator)
    assert error < ERRORS[torch.float32]


@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("kind", ["plain", "own_norm", "float32_logits", "router_bias"])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_router_products_equal_twin(kind: str, dtype: torch.dtype, num_tokens: int):
    generator = torch.Generator().manual_seed(3)
    spec = ExpertsSpec(20, 2, True, 1, True, "sigmoid")
    weight, bias = randn(generator, 21, 24).to(dtype), None
    if kind == "router_bias":
        bias = randn(generator, 21).to(dtype)
    norm = torch.rand(24, generator=generator) if kind == "own_norm" else None
    activate = partial(gated_activation_torch, activation="silu")
    linears = (
        Linear(partial(F.linear, weight=weight, bias=bias), rms_norm_torch, activate),
        FusedLinear(weight, bias, "silu", False),
    )
    twin, own = (Router(linear, is_wide=kind == "float32_logits", norm=norm) for linear in linears)
    x = randn(generator, num_tokens, 24).to(dtype)
    assert mixture_error(spec, (twin, own), x, 24, "silu", True, generator) < ERRORS[dtype]


def test_many_choices_are_sorted_by_expert():
    layer = GroupedExperts.__new__(GroupedExperts)
    layer.spec, layer.deterministic = ExpertsSpec(64, 4, True, shared=1), False
    assert [layer._is_single(n, 512, 8) for n in (1, 6, 7)] == [True, True, False]
    assert [layer._is_single(n, 2048, 8) for n in (4, 5)] == [True, False]  # there are 1,024 counters
    layer.spec = ExpertsSpec(8, 2, True)
    assert [layer._is_single(n, 512, 8) for n in (1, 2, 3)] == [True, True, False]
    layer.deterministic = True
    assert not layer._is_single(1, 512, 8)
