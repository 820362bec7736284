"""Products with quantized weights on a GPU: against float64, exact for every value, and with a row's bits for any
number of rows."""

import pytest
import torch

from runtime.kernels.quantized.int_wna16_gemm import has_int_wna16_gemm
from runtime.kernels.quantized.quantized_linear import Int16Linear, QuantizedLinear
from runtime.kernels.quantized.quantized_weight import dequantize_torch
from runtime.kernels.quantized.weight_conversions import dequantize_triton
from runtime.kernels.quantized.wna16_skinny_gemm import wna16_skinny_gemm_triton
from tests.support.kernels.quantized_weights import FORMS, some_weight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(map(str, form)))
CASES = [  # eight chunks, four and one; odd sizes; few formats and shapes, because each compiles a dozen kernels
    (("fp8", 0, 1), 4096, 4096), (("int4", 128, 1), 6144, 2048), (("int8 minimums", 128, 1), 1002, 1168),
    (("table", 64, 1), 34, 128), (("uint4 minimums", 32, 1), 2048, 2048), (("uint4 minimums", 128, 1), 4096, 4096),
    (("int8", 0, 1), 4096, 14336), (("e2m1", 32, 1), 16384, 1024), (("table", 64, 1), 4096, 8192),
]  # fmt: skip
cases = pytest.mark.parametrize(
    ("form", "size_out", "size_in"),
    CASES,
    ids=lambda part: str(part) if isinstance(part, int) else " ".join(map(str, part)),
)


@pytest.fixture(autouse=True)
def on_the_device():
    torch.manual_seed(0)
    with torch.device("cuda"):
        yield


@forms
def test_every_quantized_value_is_dequantized_exactly(form):
    """Each row of x selects one column, and a sum of one value is exact."""
    weight = some_weight(form, 512, 16)
    eye = torch.eye(16, weight.shape[1]).bfloat16()
    got = wna16_skinny_gemm_triton(eye, weight, out_dtype=torch.float32, fixed_order=True)
    torch.testing.assert_close(got, dequantize_torch(weight)[:, :16].t(), rtol=3e-7, atol=1e-7)


@cases
def test_layers_against_float64(form, size_out, size_in):
    weight = some_weight(form, size_out, size_in)
    size_in = weight.shape[1]
    dense = dequantize_torch(weight)
    torch.testing.assert_close(dequantize_triton(weight, torch.float32), dense, rtol=1e-6, atol=1e-7)
    ones, dense = torch.ones(size_in).bfloat16(), dense.double()
    layers = [QuantizedLinear(weight, None, "silu", deterministic) for deterministic in (False, True)]
    if has_int_wna16_gemm(weight):
        layers.append(Int16Linear(weight, None, "silu"))
    for layer in layers:
        kind = type(layer).__name__, layer.deterministic
        for rows in (1, 8, 9, 16, 32, 64, 100, 256, 300):
            x = torch.randn(rows, size_in + 8)[:, :size_in].bfloat16()
            want = (x.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt()) @ dense.t()
            got = layer.logits(x, ones, 1e-5)
            assert ((got.double() - want).norm() / want.norm()).item() < 8e-3, (*kind, rows)
            residual = torch.zeros(rows, size_out).bfloat16()
            layer.add_to(residual, x)
            want = x.double() @ dense.t()
            assert ((residual.double() - want).norm() / want.norm()).item() < 8e-3, (
                type(layer),
                layer.deterministic,
                rows,
            )


@cases
def test_deterministic_layers_are_batch_invariant(form, size_out, size_in):
    weight = some_weight(form, size_out, size_in)
    size_in = weight.shape[1]
    x = torch.randn(300, size_in) * torch.randint(-6, 7, (300, size_in)).float().exp2()
    x, norm, start = x.bfloat16(), torch.ones(size_in).bfloat16(), torch.randn(300, size_out).bfloat16()
    layer = QuantizedLinear(weight, None, "silu", deterministic=True)

    def results(first: int, rows: int) -> list[torch.Tensor]:
        part, residual = x[first : first + rows], start[first : first + rows].clone()
        layer.add_to(residual, part)
        return [layer.logits(part, norm, 1e-5), layer.normed(part, norm, 1e-5), layer.gated(part, norm, 1e-5), residual]

    whole = results(0, 300)
    for rows in (1, 8, 9, 17, 33, 130):
        for first in (0, 300 - rows):
            for verb, part, want in zip(
                ("logits", "normed", "gated", "add_to"), results(first, rows), whole, strict=True
            ):
                assert torch.equal(part, want[first : first + rows]), (verb, first, rows)
