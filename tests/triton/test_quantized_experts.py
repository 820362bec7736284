"""Mixtures of experts with quantized weights against their torch twin, in every format, with one row a program, and
with few and many rows an expert. In deterministic mode a row's bits are fixed."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.experts.moe_torch import ExpertBiases, Experts, Router
from runtime.kernels.experts.moe_wna16 import QuantizedExperts
from runtime.kernels.experts.moe_wna16_words import rounded_scales
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.linear.split_k import split_counters
from runtime.kernels.norm.gated_activation import gated_activation_torch
from runtime.kernels.norm.rms_norm import rms_norm_torch, rms_norm_triton
from runtime.kernels.quantized.quantized_weight import dequantize_torch
from tests.support.kernels.quantized_weights import some_weight
from tests.support.kernels.routing_cases import distinct_logits, router_of, specs

SPEC = ExpertsSpec(3, 1, True, shared=1, shared_gate=True)
BY_SIZE = ExpertsSpec(6, 1, True)
ROWS = {"single": 1, "few": 17, "many": 110}  # 2, 34 and 220 choices of four experts


@pytest.mark.parametrize(
    ("form", "hidden", "ffn", "rows"),
    [
        (("fp8", 0, 1), 80, 48, "few"),
        (("fp8", 128, 128), 128, 128, "single"),
        (("int8", 0, 1), 80, 48, "many"),
        (("int4", 128, 1), 128, 128, "few"),
        (("int4", 32, 1), 64, 192, "few"),
        (("uint4 minimums", 64, 1), 128, 128, "single"),
        (("uint4 minimums", 32, 1), 64, 64, "many"),
        (("table", 64, 1), 128, 128, "single"),
        (("e2m1", 32, 1), 64, 64, "many"),
        (("int4", 16, 1), 128, 64, "few"),
        (("e2m1", 32, 1), 64, 64, "single, biases"),
        (("e2m1", 32, 1), 64, 64, "few, biases"),
        (("fp8", 0, 1), 80, 48, "many, biases"),
    ],
    ids=lambda part: part if isinstance(part, str) else str(part).replace("'", ""),
)
def test_mixtures(form, hidden, ffn, rows):
    torch.manual_seed(0)
    pairs = [(some_weight(form, 2 * ffn, hidden), some_weight(form, hidden, ffn)) for _ in range(SPEC.all_experts)]
    for weight in (weight for pair in pairs for weight in pair):
        weight.scales.add_(0.01 * (weight.scales.numel() < 128))  # one common block would be zero
    pairs = [tuple(map(rounded_scales, pair)) for pair in pairs]
    router, norm = torch.randn(SPEC.all_experts, hidden), torch.rand(hidden)
    rows, has_biases, _ = rows.partition(", biases")
    activation, biases = "silu", ExpertBiases()
    if has_biases:
        activation = "swiglu_clamped"
        biases = ExpertBiases(*(torch.randn(SPEC.all_experts, size) for size in (2 * ffn, hidden)))
    by_row = Linear(lambda x: torch.cat([F.linear(row, router) for row in x.split(1)]), rms_norm_triton, torch.abs)
    twin = Experts(
        SPEC, Router(Linear(lambda x: F.linear(x, router), rms_norm_torch, torch.abs)),
        [tuple(dequantize_torch(w) for w in pair) for pair in pairs],
        lambda w: lambda x: F.linear(x, w), lambda y: gated_activation_torch(y, activation),
    )  # fmt: skip
    twin.biases = biases
    x = torch.randn(ROWS[rows], hidden) * 1e-3  # small beside the experts' output
    want = x.clone()
    twin.add_to(want, norm, 1e-5)
    for deterministic in (False, True)[: 1 + (rows == "many")]:
        got, alone = x.clone(), x[:1].clone()
        mixture = QuantizedExperts(SPEC, Router(by_row), pairs, activation, deterministic)
        mixture.biases = biases
        mixture.add_to(got, norm, 1e-5)
        assert (got - want).norm() < 3e-5 * (want - x).norm(), deterministic
    if deterministic:
        mixture.add_to(alone, norm, 1e-5)
        assert torch.equal(alone[0], got[0])


@pytest.mark.parametrize(
    ("form", "hidden", "ffn"),
    [
        (("e2m1", 32, 1), 320, 192),  # half a step
        (("e2m1", 16, 1), 192, 64),
        (("int4", 32, 1), 128, 192),
        (("int4", 64, 1), 256, 128),
        (("int4", 128, 1), 128, 128),
        (("uint4 minimums", 64, 1), 128, 128),
        (("int8", 0, 1), 80, 48),
        (("fp8", 0, 1), 144, 40),
    ],
    ids=str,
)
def test_experts_with_no_and_with_many_choices(form, hidden, ffn):
    """Experts have 0, 1, 15, 16, 17 and 100 choices."""
    torch.manual_seed(0)
    pairs = [(some_weight(form, 2 * ffn, hidden), some_weight(form, hidden, ffn)) for _ in range(6)]
    pairs = [tuple(map(rounded_scales, pair)) for pair in pairs]
    chosen = torch.tensor([0, 1, 15, 16, 17, 100])
    experts = torch.repeat_interleave(torch.arange(6), chosen)[torch.randperm(149)]
    x, norm = torch.randn(149, hidden) * 1e-3, torch.ones(hidden)
    by_row = Linear(lambda x: F.one_hot(experts, 6) * 9.0, rms_norm_torch, torch.abs)
    twin = Experts(
        BY_SIZE, Router(by_row), [tuple(dequantize_torch(w) for w in pair) for pair in pairs],
        lambda w: lambda x: F.linear(x, w), lambda y: gated_activation_torch(y, "silu"),
    )  # fmt: skip
    want, got = x.clone(), x.clone()
    twin.add_to(want, norm, 1e-5)
    QuantizedExperts(BY_SIZE, Router(by_row), pairs, "silu", False).add_to(got, norm, 1e-5)
    assert (got - want).norm() < 3e-5 * (want - x).norm()


@settings(max_examples=25, deadline=None)
@given(specs(), st.integers(1, 16), st.integers(0, 1 << 30))
def test_few_tokens_of_any_router_equal_twin(spec: ExpertsSpec, num_tokens: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    hidden, ffn = 24, 16
    pair = some_weight(("int8", 0, 1), 2 * ffn, hidden), some_weight(("int8", 0, 1), hidden, ffn)
    pairs = [tuple(replace(w, scales=w.scales * (1 + expert)) for w in pair) for expert in range(spec.all_experts)]
    x, logits = torch.randn(num_tokens, hidden) * 1e-3, distinct_logits(spec, num_tokens, 3, generator)
    router = router_of(spec, Linear(lambda x: logits, rms_norm_torch, torch.abs), generator)
    twin = Experts(
        spec, router, [tuple(dequantize_torch(w) for w in pair) for pair in pairs],
        lambda w: lambda x: F.linear(x, w), lambda y: gated_activation_torch(y, "silu"),
    )  # fmt: skip
    want, got = x.clone(), x.clone()
    twin.add_to(want, torch.ones(hidden), 1e-5)
    QuantizedExperts(spec, router, pairs, "silu", False).add_to(got, torch.ones(hidden), 1e-5)
    assert (got - want).norm() <= 3e-5 * (want - x).norm()
    assert not split_counters(x.device).any()
