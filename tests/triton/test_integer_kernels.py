"""Rows as digits and their products with weights that are whole numbers, against their torch twins; in float16, as the
interpreter truncates to bfloat16."""

import pytest
import torch
import torch.nn.functional as F

from runtime.kernels.linear.tiles import Tiling
from runtime.kernels.norm.gated_activation import gated_activation_torch
from runtime.kernels.norm.rms_norm import rms_norm_torch
from runtime.kernels.quantized.activations import Int16Activations, quantize_int16_torch, quantize_int16_triton
from runtime.kernels.quantized.int_wna16_gemm import has_int_wna16_gemm, int_wna16_gemm_torch, int_wna16_gemm_triton
from runtime.kernels.quantized.quantized_linear import Int16Linear
from runtime.kernels.quantized.quantized_weight import (
    QuantizedWeight,
    dequantize_torch,
    pack_planes,
    plane_of,
    quantized_weight,
)

ROWS, SIZE = 21, 272
OPERATIONS = {
    "plain": (SIZE, {}),
    "norm": (SIZE, {"norm_weight": True, "eps": 1e-5}),
    "gated": (2 * SIZE, {"activation": "silu"}),
    "ungated": (SIZE, {"activation": "gelu_tanh", "gated": False}),
}
# format, columns of a group, whether there are zero points
FORMS = [("int8", 0, False), ("int8", 128, False), ("int4", 64, False), ("int4", 128, False), ("uint4", 64, True),
         ("uint4", 128, True)]  # fmt: skip


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def some_weight(form: str, group: int, minimums: bool, size_out: int, size_in: int) -> QuantizedWeight:
    if form == "int8":
        codes = torch.randint(-128, 128, (size_out, size_in), dtype=torch.int8)
    else:
        codes = torch.randint(0, 16, (size_out, size_in), dtype=torch.uint8)
        codes[:, :16] = torch.arange(16, dtype=torch.uint8)
        codes = pack_planes(codes, plane_of(group))
    scales = torch.rand(size_out, -(-size_in // group) if group else 1) * 2e-2
    return quantized_weight(form, codes, scales, scales * 7 if minimums else None, group_size=group)


def within_one(got: Int16Activations, want: Int16Activations) -> bool:
    """True if integers differ by one at most, and seldom."""
    differ = (got.dequantize(torch.float64) - want.dequantize(torch.float64)).abs() / want.scales[:, None].double()
    return bool(differ.max() < 1.01 and (differ > 0.5).double().mean() < 0.01)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_rows_equal_those_of_the_twin(operation):
    width, options = OPERATIONS[operation]
    x = torch.randn(ROWS, width + 8).half()[:, :width]
    x[3] = 0
    if "norm_weight" in options:
        options = options | {"norm_weight": torch.randn(SIZE).half()}
    got = quantize_int16_triton(x, group_size=64, **options)
    want = quantize_int16_torch(x, group_size=64, **options)
    assert torch.allclose(got.scales, want.scales, rtol=1e-5)
    assert within_one(got, want)
    assert not got.limbs[6:8].any()
    numbers = F.pad(got.dequantize(torch.float64) / got.scales[:, None], (0, 320 - SIZE))
    assert torch.allclose(got.sums.double(), numbers.unflatten(1, (5, 64)).sum(2).t(), atol=0.5)


def test_every_integer_becomes_its_limbs():
    x = torch.arange(-32512, 32513).float()[None]  # the scale is 1
    rows = quantize_int16_triton(x)
    assert rows.scales.item() == 1
    assert torch.equal(rows.dequantize(torch.float32), x)
    assert torch.equal(rows.limbs[1].long() & 255, x[0].long() & 255)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_non_finite_row_stays_so_and_affects_no_other(value):
    x = torch.randn(3, 128)
    x[1, 5] = value
    weight = some_weight("int4", 128, False, 16, 128)
    y = int_wna16_gemm_triton(quantize_int16_triton(x), weight, dtype=torch.float32)
    assert not y[1].isfinite().any()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize(("form", "group", "minimums"), FORMS)
@pytest.mark.parametrize("tiling", [Tiling(16, 64, 64, 4, 2), Tiling(32, 64, 64, 4, 2, 2)])
def test_products_equal_those_of_the_twin(form, group, minimums, tiling):
    size_out, size_in = 136, 272 if (form, group) == ("int8", 0) else 384
    weight = some_weight(form, group, minimums, size_out, size_in)
    rows = quantize_int16_triton(torch.randn(ROWS, size_in), group_size=group if minimums else 0)
    bias, residual = torch.randn(size_out), torch.randn(ROWS, size_out)
    want = int_wna16_gemm_torch(rows, weight, bias, dtype=torch.float32)
    got = int_wna16_gemm_triton(rows, weight, bias, dtype=torch.float32, tiling=tiling)
    assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)
    exact = residual + want
    assert int_wna16_gemm_triton(rows, weight, bias, residual, tiling=tiling) is residual
    assert torch.allclose(residual, exact, rtol=1e-4, atol=1e-4)


def test_sums_of_whole_rows_are_exact():
    codes = torch.randint(-128, 128, (16, 28672), dtype=torch.int8)
    codes[0], codes[1] = 127, -128
    weight = quantized_weight("int8", codes, torch.ones(16, 1))
    x = torch.randint(-32512, 32513, (2, 28672)).float()
    x[0], x[:, 5] = 32512, 32512  # so that scales are 1
    want = x.double() @ dequantize_torch(weight).double().t()
    got = int_wna16_gemm_triton(quantize_int16_triton(x), weight, dtype=torch.float32)
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=300)  # 300: both digits' sums are rounded to float32


@pytest.mark.parametrize(("form", "group", "minimums"), [("int8", 0, False), ("uint4", 128, True)])
def test_layers_equal_those_of_dense_weights(form, group, minimums):
    gate_up = some_weight(form, group, minimums, 2 * 256, 128)
    down = some_weight(form, group, minimums, 128, 256)
    layers = [Int16Linear(weight, None, "silu") for weight in (gate_up, down)]
    norm, x = torch.rand(128), torch.randn(10, 128)
    normed = rms_norm_torch(x, norm, 1e-5)
    wide = [dequantize_torch(weight) for weight in (gate_up, down)]
    want = gated_activation_torch(normed @ wide[0].t(), "silu")
    assert torch.allclose(layers[0].gated(x, norm, 1e-5), want, rtol=2e-3, atol=2e-2)
    logits = torch.empty(10, 512)
    assert torch.allclose(layers[0].logits(x, norm, 1e-5, logits), normed @ wide[0].t(), rtol=2e-3, atol=2e-3)
    residual = x.clone()
    layers[0].gated_into(layers[1], residual, norm, 1e-5)
    assert torch.allclose(residual, x + want @ wide[1].t(), rtol=5e-3, atol=0.1)


def test_supported_products_and_their_tiles():
    takes = {
        (form, group): has_int_wna16_gemm(some_weight(form, group, minimums, 16, 256))
        for form, group, minimums in [*FORMS, ("int4", 32, False), ("int8", 64, False)]
    }
    assert takes == {(form, group): True for form, group, _ in FORMS} | {("int4", 32): False, ("int8", 64): False}
    assert not has_int_wna16_gemm(some_weight("int8", 0, False, 12, 256))  # rows of 24 bytes
    for form, group, most in (("int8", 0, 256), ("int4", 128, 128), ("int4", 64, 64)):
        layer = Int16Linear(some_weight(form, group, False, 16, 256), None, "silu")
        assert [layer.quantizes_rows(n) for n in (1, 8, 9, most, most + 1)] == [False, False, True, True, False]
