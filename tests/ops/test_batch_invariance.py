"""Deterministic mode's operations on a CPU: a row's bits depend neither on the rows around it nor on its index.

CI also runs these tests with fewer instructions than its CPU has (.ci/run), because libraries choose kernels by
them."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.base.model.decoder_spec import ExpertsSpec, RopeSpec
from runtime.kernels.attention.rope import rope_table
from runtime.kernels.experts.moe_torch import route_torch
from runtime.kernels.linear import linear_torch as linear
from runtime.kernels.linear.linear_torch import agreeing_sizes, batch_invariant_product
from runtime.kernels.norm.gated_activation import gated_activation_exact
from runtime.kernels.norm.layer_norm import layer_norm_torch
from runtime.kernels.norm.rms_norm import rms_norm_torch
from runtime.kernels.sampling.gumbel import gumbel_noise, noise_keys
from runtime.kernels.sampling.logprobs import token_logprobs

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(st.sampled_from([(16, 48), (50, 1), (576, 333), (1536, 48), (100, 90)]), st.integers(1, 150), st.integers(0, 40))
def test_products(dtype, size, num_rows, first):
    torch.manual_seed(size[0])
    product = batch_invariant_product(torch.randn(*reversed(size)).to(dtype), torch.randn(size[1]).to(dtype))
    x = torch.randn(190, size[0]).to(dtype)
    assert torch.equal(product(x[first : first + num_rows]), product(x)[first : first + num_rows])


SPEC = ExpertsSpec(7, 3, True)
SIGMOID = ExpertsSpec(6, 3, True, shared=1, shared_gate=True, scores="sigmoid", choice_bias=True)
GROUPS = ExpertsSpec(6, 3, True, scores="sigmoid", groups=3, top_groups=2, group_score="top2")
OF_CHOSEN = ExpertsSpec(7, 3, False, scores="softmax_of_chosen")
ROW_OPERATIONS = {
    "rms norm": lambda x: rms_norm_torch(x, torch.ones(x.shape[1]), 1e-6),
    "layer norm": lambda x: layer_norm_torch(x, torch.ones(2, x.shape[1]), 1e-6),
    "silu": lambda x: gated_activation_exact(x, "silu", gated=False),
    "gelu": lambda x: gated_activation_exact(x, "gelu_tanh", gated=False),
    "swiglu": lambda x: gated_activation_exact(torch.cat((x, 1 - x), 1), "swiglu_clamped"),
    "soft cap": torch.tanh,
    "router": lambda x: route_torch(x[:, :7], SPEC)[1],
    "router by sigmoid": lambda x: route_torch(x[:, :7], SIGMOID, torch.arange(6) / 50)[1],
    "router of groups": lambda x: route_torch(x[:, :6], GROUPS)[1],
    "router of chosen": lambda x: route_torch(x[:, :7], OF_CHOSEN)[1],
    "log-probabilities": lambda x: token_logprobs(x, torch.ones(len(x), dtype=torch.int64), 3)[3],
    "noise": lambda x: gumbel_noise(noise_keys(x[:, 0].long(), x[:, 1].int())[:, :, None], torch.arange(999).int()),
}


@pytest.mark.parametrize("operation", ROW_OPERATIONS)
def test_operations_on_rows(operation):
    compute = ROW_OPERATIONS[operation]
    for width in (7, 10, 48, 100, 131, 576, 3000):
        x = torch.randn(70, width, generator=torch.Generator().manual_seed(width)) * 5
        together = compute(x.clone())
        for first, count in ((0, 1), (1, 1), (69, 1), (3, 2), (5, 17), (6, 64)):
            assert torch.equal(compute(x[first : first + count].clone()), together[first : first + count]), width


@pytest.mark.parametrize("kind", ["default", "dynamic"])
def test_longer_rotary_tables_begin_like_shorter_ones(kind):
    table = partial(rope_table, RopeSpec(1e4, kind, 4.0, original_positions=64), 20, dtype=torch.float32)
    assert torch.equal(table(num_positions=2000)[:, :501], table(num_positions=501))


# ---- which calls a product is trusted with ---------------------------------------------------------------------------


def form_of(cut: Callable[[int, int], int]) -> Callable[[torch.Tensor, torch.Tensor | None], linear.Product]:
    """Products that sum the columns before and after a cut separately. The cut depends on the number of rows and on the
    row's index."""

    def form(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Product:
        def one(row: torch.Tensor, at: int) -> torch.Tensor:
            terms = weight.float() * row.float()
            return (terms[:, :at].sum(1) + terms[:, at:].sum(1)).to(weight.dtype)

        return lambda x: torch.stack([one(row, cut(len(x), place)) for place, row in enumerate(x)])

    return form


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("cut", "agrees"),
    [
        (lambda num_rows, place: 8, lambda size: True),
        (lambda num_rows, place: 8 + (num_rows == 2), lambda size: size != 2),
        (lambda num_rows, place: 8 + (num_rows > 32), lambda size: size <= 32),
        (lambda num_rows, place: 8 + (num_rows == 4 and place == 3), lambda size: size != 4),
        (lambda num_rows, place: 8 + (place == 15), lambda size: False),
    ],
)
def test_only_calls_with_equal_bits_are_used(dtype, cut, agrees):
    sizes = agreeing_sizes(form_of(cut), 30, 21, dtype, CPU, 1)
    assert sizes == tuple(filter(agrees, linear._CALL_SIZES))


@pytest.mark.parametrize("num_rows", [1, 3, 17, 23, 70])
def test_a_batch_is_split_into_equal_bit_calls(monkeypatch, num_rows):
    monkeypatch.setattr(linear, "can_pack", lambda dtype, device: True)
    monkeypatch.setattr(linear, "packed_linear", form_of(lambda num_rows, place: 8 + (16 <= num_rows < 24)))
    weight, x = torch.randn(30, 21), torch.randn(num_rows, 21)
    want = form_of(lambda num_rows, place: 9)(weight, None)(x)
    assert torch.equal(batch_invariant_product(weight, None)(x), want)


def test_float32_replaces_an_irregular_narrow_dtype(monkeypatch):
    def form(weight: torch.Tensor, bias: torch.Tensor | None) -> linear.Product:
        shift = weight.dtype == torch.bfloat16
        return form_of(lambda num_rows, place: 8 + shift * place)(weight, bias)

    monkeypatch.setattr(linear, "can_pack", lambda dtype, device: True)
    monkeypatch.setattr(linear, "packed_linear", form)
    weight, x = torch.randn(30, 21).bfloat16(), torch.randn(5, 21).bfloat16()
    got = batch_invariant_product(weight, None)(x)
    assert torch.equal(got, form(weight.float(), None)(x.float()).bfloat16())


def test_rows_are_computed_alone_if_no_call_is_regular(monkeypatch):
    irregular = form_of(lambda num_rows, place: 8 + place)
    for name in ("packed_linear", "plain_linear"):
        monkeypatch.setattr(linear, name, irregular)
    weight, bias, x = torch.randn(30, 21), torch.randn(30), torch.randn(5, 21)
    want = torch.cat([F.linear(row.clone(), weight, bias) for row in x.split(1)])
    assert torch.equal(batch_invariant_product(weight, bias)(x), want)
