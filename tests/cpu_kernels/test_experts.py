"""Mixtures as compiled kernels: the choice is the torch twin's, and each product has the bits of its own layer."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.cpu.experts.choice import choose_experts, order_choices
from runtime.kernels.cpu.experts.compiled_experts import CompiledExperts
from runtime.kernels.cpu.operations import CompiledOperations
from runtime.kernels.experts.moe_torch import Experts, Router, route_torch
from runtime.kernels.linear.linear_torch import Operands
from runtime.kernels.norm.gated_activation import gated_activation_torch
from runtime.kernels.norm.rms_norm import rms_norm_torch
from runtime.kernels.numerics import Numerics
from tests.cpu_kernels.test_int_product import FORMS, draw_weight
from tests.support.kernels.compiled import call
from tests.support.models.specs import dense_spec

HIDDEN, FFN = 256, 256
SPEC = dense_spec(
    num_layers=1, hidden_size=HIDDEN, num_heads=2, num_kv_heads=2, head_dim=32, ffn_size=FFN, vocab_size=32,
    max_positions=16, norm_eps=1e-5,
)  # fmt: skip
ACTIVATE = partial(gated_activation_torch, activation="silu", gated=True)
OPERATIONS = CompiledOperations(
    Numerics(torch.float32, torch.device("cpu"), "llvm", packed=False, deterministic=False),
    SPEC,
    rms_norm_torch,
    ACTIVATE,
    lambda weights, bias: pytest.fail("dense weights are compiled, too"),
)
NORM = torch.linspace(0.5, 1.5, HIDDEN)


@st.composite
def specs(draw) -> ExpertsSpec:
    groups = draw(st.sampled_from([1, 2, 4]))
    top_groups = draw(st.integers(1, groups))
    size = draw(st.integers(2, 8))
    return ExpertsSpec(
        groups * size,
        draw(st.integers(1, min(6, top_groups * size))),
        draw(st.booleans()),
        shared=(shared := draw(st.integers(0, 2))),
        shared_gate=shared > 0 and draw(st.booleans()),
        scores=draw(st.sampled_from(["softmax", "sigmoid", "softmax_of_chosen"])),
        choice_bias=draw(st.booleans()),
        sum_eps=draw(st.sampled_from([0.0, 1e-20])),
        scale=draw(st.sampled_from([1.0, 2.5])),
        expert_scales=draw(st.booleans()),
        groups=groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(["max", "top2"])),
    )


def choose(logits: torch.Tensor, spec: ExpertsSpec, bias=None, scales=None, parts=3) -> tuple[torch.Tensor, ...]:
    num_rows = len(logits)
    ids, weights = torch.zeros(num_rows, spec.choices, dtype=torch.int32), torch.zeros(num_rows, spec.choices)
    memory = torch.zeros(2, num_rows, spec.num_experts)
    arguments = (logits, bias, scales, *memory, ids, weights, num_rows, logits.stride(0))
    call(choose_experts, arguments, parts=parts, spec=spec)
    return ids, weights


@given(specs(), st.integers(1, 5), st.integers(0, 1 << 30))
def test_choice_equals_the_reference(spec, num_rows, seed):
    torch.manual_seed(seed)
    logits = torch.randn(num_rows, spec.num_experts + 3)
    bias = torch.randn(spec.num_experts) if spec.choice_bias else None
    scales = torch.rand(spec.num_experts) if spec.expert_scales else None
    want_ids, want = route_torch(logits, spec, bias, scales)
    ids, weights = choose(logits, spec, bias, scales)
    assert torch.equal(ids, want_ids.int())
    torch.testing.assert_close(weights, want, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "softmax_of_chosen"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_affects_no_other(scores, value):
    spec = ExpertsSpec(8, 3, True, scores=scores)
    logits = torch.randn(3, 8)
    want = choose(logits, spec)
    logits[1] = value
    ids, weights = choose(logits, spec)
    assert ((ids >= 0) & (ids < 8)).all()
    for own, whole in zip((ids, weights), want, strict=True):
        assert torch.equal(own[::2], whole[::2])
    if value != value:
        assert weights[1].isnan().all()


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.integers(1, 4))
def test_choices_are_ordered_by_expert(experts, choices):
    ids = torch.tensor(experts, dtype=torch.int32)
    starts = torch.zeros(8, dtype=torch.int32)
    order, rows = torch.zeros(2, len(ids), dtype=torch.int32)
    call(order_choices, (ids, starts, order, rows, len(ids)), num_experts=7, choices=choices)
    assert order.tolist() == ids.argsort(stable=True).tolist()
    assert rows.tolist() == [number // choices for number in order.tolist()]
    assert starts.tolist() == [sum(e < expert for e in experts) for expert in range(8)]


def operands(form: str, size_out: int, size_in: int, seed: int, has_bias: bool) -> Operands:
    torch.manual_seed(seed)
    bias = torch.randn(size_out) if has_bias else None
    if form in FORMS:
        return Operands([draw_weight(FORMS[form], size_out, size_in, seed)], bias)
    if form == "two forms":
        parts = [draw_weight(FORMS[name], size_out // 2, size_in, seed) for name in ("Q4_K", "Q6_K")]
        return Operands(parts, bias)
    weight = torch.randn(size_out, size_in) * size_in**-0.5
    return Operands([weight.bfloat16().float() if form == "bfloat16" else weight], bias)


def mixtures(gate_up: str, down: str, of_shared: str, has_bias: bool) -> tuple[CompiledExperts, Experts]:
    """A compiled mixture, and one that runs the same layers one after another."""
    spec = ExpertsSpec(5, 2, True, shared=1)
    names = [(gate_up, down)] * 5 + [(of_shared, of_shared)]
    experts = [
        (operands(first, 2 * FFN, HIDDEN, i, has_bias), operands(second, HIDDEN, FFN, i + 10, has_bias))
        for i, (first, second) in enumerate(names)
    ]
    torch.manual_seed(1)
    router = Router(OPERATIONS.linear([torch.randn(5, HIDDEN) * 0.1], None))
    compiled = OPERATIONS.experts(spec, router, experts)
    assert isinstance(compiled, CompiledExperts)
    pairs = [tuple(OPERATIONS.linear(*own).product for own in pair) for pair in experts]
    return compiled, Experts(spec, router, pairs, lambda product: product, ACTIVATE)


def added(mixture: Any, residual: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    result = residual.clone()
    mixture.add_to(result, NORM, eps)
    return result


KINDS = pytest.mark.parametrize(
    ("gate_up", "down", "of_shared", "has_bias"),
    [
        ("mxfp4", "mxfp4", "mxfp4", True),
        ("Q4_K", "Q6_K", "Q8_0", False),
        ("two forms", "int8 rows", "bfloat16", False),
        ("bfloat16", "bfloat16", "float32", True),
    ],
)


@KINDS
def test_a_product_has_the_bits_of_its_layer(gate_up, down, of_shared, has_bias):
    mixture, _ = mixtures(gate_up, down, of_shared, has_bias)
    for num_rows in (1, 2, 23):
        x = torch.randn(num_rows, HIDDEN)
        _, choices = mixture._choose(torch.randn(num_rows, 6))
        found = mixture.gate_up.multiply(mixture.gate_up.normed(x, NORM, 1e-5), choices, choices.rows, "found").clone()
        order, starts = choices.order.tolist(), choices.starts.tolist()
        for expert, own in enumerate(mixture.gate_up.layers):
            for number in order[starts[expert] : starts[expert + 1]]:
                want = own.normed(x[number // 3 : number // 3 + 1], NORM, 1e-5)
                assert torch.equal(found[number], want[0]), (expert, number)


@KINDS
def test_a_mixture_is_that_of_its_layers(gate_up, down, of_shared, has_bias):
    """And a row's bits do not depend on the other rows."""
    mixture, reference = mixtures(gate_up, down, of_shared, has_bias)
    residual = torch.randn(530, HIDDEN)  # more than the buffers have room for at once
    found = added(mixture, residual)
    want = added(reference, residual)
    largest = float(want.abs().max())  # activations are rounded to 16 bits after two functions that differ in rounding
    torch.testing.assert_close(found, want, rtol=0, atol=3e-5 * largest)
    for rows in (slice(0, 1), slice(3, 9), slice(511, 530)):
        assert torch.equal(added(mixture, residual[rows]), found[rows])
    elsewhere = torch.ones_like(residual)
    mixture.add_to(residual, NORM, 1e-5, elsewhere)
    torch.testing.assert_close(elsewhere - 1, found - residual, rtol=0, atol=1e-6 * largest)
    half = residual[:4].bfloat16()
    torch.testing.assert_close(added(mixture, half).float(), added(mixture, half.float()), rtol=0, atol=0.02 * largest)


def test_a_hidden_state_that_is_not_finite_stays_so():
    mixture, _ = mixtures("mxfp4", "mxfp4", "mxfp4", True)
    residual = torch.randn(4, HIDDEN)
    want = added(mixture, residual)
    residual[2, 7] = float("nan")
    found = added(mixture, residual)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], want[[0, 1, 3]])
