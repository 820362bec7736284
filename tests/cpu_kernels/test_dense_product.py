"""Compiled products of dense weights: their values, and a row's bits in any batch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kernels.cpu.linear.compiled_linear import Around
from runtime.kernels.cpu.linear.dense_linear import DenseLinear
from runtime.kernels.cpu.linear.dense_product import MOST_BLOCKS, SPAN, dense_product
from runtime.kernels.cpu.linear.pack import exact_dtype, packed_blocks
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.llvm.launcher import Launcher
from runtime.kernels.norm.gated_activation import gated_activation_torch
from runtime.kernels.norm.rms_norm import rms_norm_torch
from tests.support.kernels.compiled import call, targets

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def weight_of(dtype, size_out, size_in, seed=0):
    """Float32 numbers that the dtype holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size_out, size_in, generator=generator).to(dtype).float()


def rows_of(count, size_in, seed=1):
    return torch.randn(count, size_in + 3, generator=torch.Generator().manual_seed(seed))[:, :size_in]


def multiplied(weight, x, target=None, parts=1, bias=None, out=None, converts=False):
    """The product, added to `out` if that is given."""
    packed, adds = packed_blocks(weight), out is not None
    result = torch.full((len(x), len(packed) * 16), torch.nan) if out is None else out.clone()
    sizes = len(x), len(packed), x.shape[1], x.stride(0), result.stride(0)
    converted = torch.empty(parts, MOST_BLOCKS * 16 * x.shape[1])
    call(
        dense_product, (packed, x, bias, converted, result, *sizes), target, parts, dtype=packed.dtype,
        is_one_row=len(x) == 1, converts=converts, adds=adds, has_bias=bias is not None,
    )  # fmt: skip
    return result[:, : len(weight)]


@EACH_DTYPE
@given(
    sizes=st.tuples(st.integers(1, 150), st.sampled_from([1, 7, 32, SPAN, 2 * SPAN + 5])), count=st.integers(1, 31),
    parts=st.integers(1, 4), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=15)
def test_values_equal_those_of_float64(dtype, sizes, count, parts, seed):
    weight, x = weight_of(dtype, *sizes, seed), rows_of(count, sizes[1], seed)
    want = x.double() @ weight.double().t()
    got = multiplied(weight, x, parts=parts)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6 * sizes[1])


@EACH_DTYPE
@given(count=st.integers(1, 31), parts=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_bits_depend_on_the_row_alone(dtype, count, parts, seed):
    weight, x = weight_of(dtype, 80, SPAN + 30), rows_of(count, SPAN + 30, seed)
    whole = multiplied(weight, x, parts=parts)
    assert torch.equal(whole, multiplied(weight, x, parts=parts, converts=count > 1))
    assert all(torch.equal(multiplied(weight, row)[0], whole[i]) for i, row in enumerate(x.split(1)))


@EACH_DTYPE
@pytest.mark.parametrize("count", [1, 9])
def test_each_instruction_set_gives_the_same_bits(dtype, count):
    weight, x = weight_of(dtype, 80, SPAN + 30), rows_of(count, SPAN + 30)
    first, *others = [multiplied(weight, x, target) for target in targets()]
    assert all(torch.equal(first, other) for other in others)


def test_dtype_of_storage_does_not_show():
    x, weight = rows_of(5, 64), weight_of(torch.bfloat16, 32, 64)
    odd = torch.cat((weight, torch.full((1, 64), 1 + 2**-20)))
    assert exact_dtype(weight) == torch.bfloat16
    assert exact_dtype(odd) == torch.float32
    assert torch.equal(multiplied(odd, x)[:, :32], multiplied(weight, x))


def test_bias_and_sum_are_added_last():
    weight, x, bias, out = weight_of(torch.float32, 48, 40), rows_of(3, 40), rows_of(1, 48)[0], rows_of(3, 48, 5)
    bias = bias.contiguous()
    assert torch.equal(multiplied(weight, x, bias=bias, out=out), out.contiguous() + (multiplied(weight, x) + bias))


def test_faults_stay_with_their_row():
    weight, x = weight_of(torch.float32, 48, 40), rows_of(14, 40)
    whole = multiplied(weight, x)
    x[5, 7] = torch.nan
    got, others = multiplied(weight, x), torch.arange(14) != 5
    assert torch.equal(got[others], whole[others])
    assert got[5].isnan().all()


@pytest.mark.parametrize(("hidden", "ffn"), [(64, 96), (40, 24), (20, 12)])
@pytest.mark.parametrize(("activation", "gated"), [("silu", True), ("silu", False), ("swiglu_clamped", True)])
@pytest.mark.parametrize("count", [1, 7])
def test_layers_equal_those_of_torch(hidden, ffn, activation, gated, count):
    launcher, eps = Launcher(), 1e-5
    activate = partial(gated_activation_torch, activation=activation, gated=gated)
    up, down = weight_of(torch.float32, ffn * (1 + gated), hidden), weight_of(torch.bfloat16, hidden, ffn)
    bias, norm = rows_of(1, len(up))[0].contiguous(), rows_of(1, hidden)[0].contiguous()
    weights = (up, bias), (down, None)
    around = rms_norm_torch, activate
    compiled = [DenseLinear(w, b, Around(launcher, *around, activation, gated)) for w, b in weights]
    torches = [Linear(partial(F.linear, weight=w, bias=b), *around) for w, b in weights]
    x, results = rows_of(count, hidden).contiguous(), []
    for first, second in (compiled, torches):
        residual = x.clone()
        first.gated_into(second, residual, norm, eps)
        second.add_to(residual, first.gated(residual, None, eps), norm, eps)
        results.append((residual, first.logits(x, norm, eps).clone(), first.product(x)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
