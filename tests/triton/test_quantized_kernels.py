"""Products with codes against their torch twins: every code, every form, odd sizes, the same bits for every number of
rows."""

import pytest
import torch

from runtime.kernels.linear.tiles import Tiling
from runtime.kernels.quantized.launch_configs import GemvConfig, Wna16SkinnyConfig
from runtime.kernels.quantized.quantized_weight import (
    dequantize_torch,
    pack_planes,
    unpack_planes,
)
from runtime.kernels.quantized.w4a16_gemm import has_w4a16_gemm, w4a16_gemm_triton
from runtime.kernels.quantized.weight_conversions import dequantize_triton
from runtime.kernels.quantized.wna16_gemm import wna16_gemm_torch, wna16_gemm_triton
from runtime.kernels.quantized.wna16_gemv import GEMV_ENCODINGS
from runtime.kernels.quantized.wna16_skinny_gemm import wna16_skinny_gemm_torch, wna16_skinny_gemm_triton
from tests.support.kernels.quantized_weights import FORMS, some_weight

forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(map(str, form)))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element of a new tensor is NaN until it is written."""

    def empty(*shape, **options):
        return torch.full(shape[0] if isinstance(shape[0], tuple) else shape, torch.nan, **options)

    torch.manual_seed(0)
    monkeypatch.setattr(torch, "empty", empty)


def check(got: torch.Tensor, want: torch.Tensor, *what: object, most: float = 3e-5) -> None:
    assert not got.isnan().any(), what
    error = ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()
    assert error < most, (error, *what)


OPTIONS = (
    {},
    {"bias": 1},
    {"norm": 1, "activation": "silu"},
    {"bias": 1, "residual": 1},
    {"out_dtype": torch.float32},
    {"norm": 1},
)


def test_planes_are_packed_and_unpacked():
    for plane, size in ((16, 96), (32, 192), (64, 128), (64, 256)):
        codes = torch.randint(16, (3, size), dtype=torch.uint8)
        assert torch.equal(unpack_planes(pack_planes(codes, plane), plane), codes)


SIZES = [(1, 34, 96), (1, 34, 200), (3, 18, 264), (12, 130, 128), (2, 34, 2080)]


@forms
@pytest.mark.parametrize("shift", [0, 2])
def test_few_rows(form, shift):
    rows, size_out, size_in = SIZES[(FORMS.index(form) + shift) % len(SIZES)]
    weight = some_weight(form, size_out, size_in)
    size_in = weight.shape[1]
    config = Wna16SkinnyConfig(16, 128, 2, 1, 1 + rows % 2)
    for option in OPTIONS:
        x = torch.randn(rows, size_in + 3)[:, :size_in]
        options = {k: v for k, v in option.items() if k in ("activation", "out_dtype")} | {"eps": 1e-5}
        options |= {"norm_weight": torch.randn(size_in)} if "norm" in option else {}
        residual = torch.randn(rows, size_out) if "residual" in option else None
        options |= {"bias": torch.randn(size_out)} if "bias" in option else {}
        wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        wide |= {"out_dtype": None, "residual": None if residual is None else residual.double()}
        want = wna16_skinny_gemm_torch(x.double(), weight, **wide)
        got = wna16_skinny_gemm_triton(x, weight, **options, residual=residual, config=config)
        check(got, want, form, option)


@pytest.mark.parametrize(
    "form", [form for form in FORMS if form[0].split()[0] in GEMV_ENCODINGS], ids=lambda form: " ".join(map(str, form))
)
@pytest.mark.thorough
def test_one_row_without_tensor_cores(form):
    for size_out, size_in, config in ((34, 96, GemvConfig(4, 1, 3)), (18, 656, GemvConfig(8, 2, 1))):
        weight = some_weight(form, size_out, size_in)
        size_in = weight.shape[1]
        x = torch.randn(1, size_in) * torch.randint(-9, 10, (1, size_in)).float().exp2()
        x[:, :40] = 0
        for option in OPTIONS:
            options = {k: v for k, v in option.items() if k in ("activation", "out_dtype")} | {"eps": 1e-5}
            options |= {"norm_weight": torch.randn(size_in)} if "norm" in option else {}
            residual = torch.randn(1, size_out) if "residual" in option else None
            options |= {"bias": torch.randn(size_out)} if "bias" in option else {}
            wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
            wide |= {"out_dtype": None, "residual": None if residual is None else residual.double()}
            want = wna16_skinny_gemm_torch(x.double(), weight, **wide)
            got = wna16_skinny_gemm_triton(x, weight, **options, residual=residual, config=config)
            check(got, want, form, option, most=3e-4)  # x keeps 15 bits of the largest of 16 neighbours


@forms
def test_a_row_has_the_same_bits_in_any_batch(form):
    weight = some_weight(form, 20, 600)
    # Sums that are exact: the interpreter's own order depends on the tile. tests/gpu has the order of a card.
    weight.scales.copy_(2.0 ** torch.randint(-3, 1, weight.scales.shape))
    if weight.zero_points is not None:
        weight.zero_points.copy_(torch.randint(0, 16, weight.scales.shape) / 8)
    x = torch.zeros(16, weight.shape[1]).scatter_(1, torch.randint(600, (16, 4)), torch.randint(-2, 3, (16, 4)).float())
    all_rows = wna16_skinny_gemm_triton(x, weight, fixed_order=True, config=Wna16SkinnyConfig(16, 128, 2, 1, 2))
    for rows, config in ((1, Wna16SkinnyConfig(32, 128, 2, 1, 1)), (2, Wna16SkinnyConfig(16, 64, 1, 1, 2)),
                         (9, Wna16SkinnyConfig(64, 128, 4, 1, 2))):  # fmt: skip
        got = wna16_skinny_gemm_triton(x[:rows], weight, fixed_order=True, config=config)
        assert torch.equal(got, all_rows[:rows]), rows
    for tiling in (Tiling(16, 16, 128, 4, 1), Tiling(32, 64, 64, 4, 1, split=8)):
        got = wna16_gemm_triton(x, weight, fixed_order=True, tiling=tiling)
        assert torch.equal(got, all_rows), tiling


@forms
def test_many_rows(form):
    for rows, size_out, size_in, split in ((17, 34, 200, False), (20, 18, 600, True)):
        weight = some_weight(form, size_out, size_in)
        size_in = weight.shape[1]
        x = torch.randn(rows, size_in + 3)[:, :size_in]
        bias, residual = torch.randn(size_out), torch.randn(rows, size_out)
        want = wna16_gemm_torch(x.double(), weight, bias.double())
        check(wna16_gemm_triton(x, weight, bias, tiling=Tiling(16, 32, 128, 4, 1, split)), want, form)
        want = wna16_gemm_torch(x.double(), weight, residual=residual.double())
        got = wna16_gemm_triton(x, weight, residual=residual, tiling=Tiling(32, 16, 64, 4, 1, split))
        check(got, want, form)


@pytest.mark.parametrize(
    "form", [form for form in FORMS if form[0].split()[0] not in ("fp8", "int8") and form[1] >= 32], ids=str
)
def test_tiles_of_dequantized_weights(form):
    cases = (17, 40, 200, Tiling(16, 64, 0, 4, 2)), (40, 24, 600, Tiling(32, 64, 0, 4, 2, 2))
    for rows, size_out, size_in, tiling in cases:
        weight = some_weight(form, size_out, size_in)
        size_in = weight.shape[1]
        assert has_w4a16_gemm(weight)
        x = torch.randn(rows, size_in + 4)[:, :size_in]
        bias, residual = torch.randn(size_out), torch.randn(rows, size_out)
        want = wna16_gemm_torch(x.double(), weight, bias.double())
        check(w4a16_gemm_triton(x, weight, bias, tiling=tiling), want, form)
        want = wna16_gemm_torch(x.double(), weight, residual=residual.double())
        check(w4a16_gemm_triton(x, weight, residual=residual, tiling=tiling), want, form)


def test_every_quantized_value_is_dequantized_exactly():
    """Each row of x selects one column, and a sum of one value is exact."""
    for form in FORMS:
        if form[1] in (0, 16, 32, 64) or "fp8" in form[0]:
            weight = some_weight(form, 64, 16)
            eye = torch.eye(16, weight.shape[1])
            got = wna16_skinny_gemm_triton(eye, weight, out_dtype=torch.float32, config=Wna16SkinnyConfig(64, 32, 4))
            torch.testing.assert_close(got, dequantize_torch(weight)[:, :16].t(), rtol=2e-7, atol=0)


@forms
def test_a_dense_copy_has_the_same_values(form):
    for size_out, size_in in ((34, 200), (20, 600)):
        weight = some_weight(form, size_out, size_in)
        torch.testing.assert_close(
            dequantize_triton(weight, torch.float32), dequantize_torch(weight), rtol=1e-6, atol=1e-7
        )
