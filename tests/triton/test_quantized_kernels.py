"""Products with codes against their torch twins: every code, every form, odd sizes, the same bits for every number of
rows."""

import pytest
import torch

from runtime.kernels.quantized_linear import (
    QuantizedTiling,
    dequantize_triton,
    quantized_linear_torch,
    quantized_linear_triton,
)
from runtime.kernels.quantized_skinny_gemm import (
    QuantizedConfig,
    quantized_skinny_gemm_torch,
    quantized_skinny_gemm_triton,
)
from runtime.kernels.quantized_weight import (
    E2M1,
    QuantizedWeight,
    dequantize,
    pack_planes,
    quantized_weight,
    unpack_planes,
)

NF4 = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626,
       0.7230, 1.0)  # fmt: skip
FORMS = [("fp8", 0, 1), ("fp8", 128, 128), ("int8", 0, 1), ("int8", 32, 1), ("int8 minimums", 128, 1),
         ("int8 minimums", 0, 1), ("int4", 0, 1), ("int4", 128, 1), ("int4", 64, 1), ("int4", 32, 1), ("int4", 256, 1),
         ("uint4 minimums", 128, 1), ("uint4 minimums", 64, 1), ("uint4 minimums", 32, 1), ("table", 64, 1),
         ("e2m1", 32, 1)]  # fmt: skip
forms = pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(map(str, form)))


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element of a new tensor is NaN until it is written."""

    def empty(*shape, **options):
        return torch.full(shape[0] if isinstance(shape[0], tuple) else shape, torch.nan, **options)

    torch.manual_seed(0)
    monkeypatch.setattr(torch, "empty", empty)


def some_weight(form: tuple[str, int, int], size_out: int, size_in: int) -> QuantizedWeight:
    """All codes in turn; scales of many magnitudes, some of them zero."""
    (name, *more), group, scale_rows = form[0].split(), *form[1:]
    order = torch.arange(size_in) + 37 * torch.arange(size_out)[:, None]
    match name:
        case "fp8":
            data = order.to(torch.uint8)
            codes = data.where(data & 127 != 127, 0).view(torch.float8_e4m3fn)
        case "int8":
            codes = order.to(torch.int8)
        case _:
            codes = (order + order // 16).to(torch.uint8) & 15
    shape = -(-size_out // scale_rows), -(-size_in // group) if group else 1
    scales = torch.rand(shape) * 0.02
    scales[-1, 0] = 0
    table = {"table": NF4, "e2m1": E2M1}.get(name, ())
    minimums = torch.rand(shape) * 0.1 if more else None
    return quantized_weight(name, codes, scales, minimums, group=group, scale_rows=scale_rows, table=table)


def check(got: torch.Tensor, want: torch.Tensor, *what: object) -> None:
    assert not got.isnan().any(), what
    error = ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()
    assert error < 1e-5, (error, *what)


OPTIONS = (
    {},
    {"bias": 1},
    {"norm": 1, "activation": "silu"},
    {"bias": 1, "residual": 1},
    {"out_dtype": torch.float32},
    {"norm": 1},
)


def test_planes_are_packed_and_unpacked():
    for plane, size in ((32, 64), (64, 100), (64, 257)):
        codes = torch.randint(16, (3, size), dtype=torch.uint8)
        assert torch.equal(unpack_planes(pack_planes(codes, plane), plane, size), codes)


@forms
@pytest.mark.parametrize(
    ("rows", "size_out", "size_in", "vector"),
    [(1, 34, 96, True), (1, 34, 200, False), (3, 18, 264, False), (12, 130, 128, False), (2, 34, 1100, False)],
)
def test_few_rows(form, rows, size_out, size_in, vector):
    weight = some_weight(form, size_out, size_in)
    config = QuantizedConfig(16, 128, 2, 1, 1 + rows % 2, vector=vector and not weight.plane)
    for option in OPTIONS:
        x = torch.randn(rows, size_in + 3)[:, :size_in]
        options = {k: v for k, v in option.items() if k in ("activation", "out_dtype")} | {"eps": 1e-5}
        options |= {"norm_weight": torch.randn(size_in)} if "norm" in option else {}
        residual = torch.randn(rows, size_out) if "residual" in option else None
        options |= {"bias": torch.randn(size_out)} if "bias" in option else {}
        wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        wide |= {"out_dtype": None, "residual": None if residual is None else residual.double()}
        want = quantized_skinny_gemm_torch(x.double(), weight, **wide)
        got = quantized_skinny_gemm_triton(x, weight, **options, residual=residual, config=config)
        check(got, want, form, option)


@forms
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(form):
    weight = some_weight(form, 40, 1100)
    # Sums that are exact: the interpreter's own order depends on the tile. tests/gpu has the order of a card.
    weight.scales.copy_(2.0 ** torch.randint(-3, 1, weight.scales.shape))
    if weight.minimums is not None:
        weight.minimums.copy_(torch.randint(0, 16, weight.scales.shape) / 8)
    x = torch.zeros(16, 1100).scatter_(1, torch.randint(1100, (16, 4)), torch.randint(-2, 3, (16, 4)).float())
    all_rows = quantized_skinny_gemm_triton(x, weight, fixed_order=True, config=QuantizedConfig(16, 128, 2, 1, 2))
    for rows, config in ((1, QuantizedConfig(32, 128, 2, 1, 1)), (2, QuantizedConfig(16, 64, 1, 1, 2)),
                         (9, QuantizedConfig(64, 128, 4, 1, 4, early_x=False))):  # fmt: skip
        got = quantized_skinny_gemm_triton(x[:rows], weight, fixed_order=True, config=config)
        assert torch.equal(got, all_rows[:rows]), rows
    for tiling in (QuantizedTiling(16, 16, 128, 4, 1), QuantizedTiling(32, 64, 64, 4, 1, split=True)):
        assert torch.equal(quantized_linear_triton(x, weight, tiling=tiling), all_rows), tiling


@forms
def test_many_rows(form):
    for rows, size_out, size_in, split in ((17, 34, 200, False), (20, 18, 1100, True)):
        weight = some_weight(form, size_out, size_in)
        x, bias, residual = (
            torch.randn(rows, size_in + 3)[:, :size_in],
            torch.randn(size_out),
            torch.randn(rows, size_out),
        )
        want = quantized_linear_torch(x.double(), weight, bias.double())
        check(quantized_linear_triton(x, weight, bias, tiling=QuantizedTiling(16, 32, 128, 4, 1, split)), want, form)
        want = quantized_linear_torch(x.double(), weight, residual=residual.double())
        got = quantized_linear_triton(x, weight, residual=residual, tiling=QuantizedTiling(32, 16, 64, 4, 1, split))
        check(got, want, form)


def test_every_code_is_decoded_exactly():
    """Each row of x picks out one column: a sum of one number is exact."""
    eye = torch.eye(16)
    for form in FORMS:
        if form[1] in (0, 32, 64) or "fp8" in form[0]:
            weight = some_weight(form, 64, 16)
            got = quantized_skinny_gemm_triton(eye, weight, out_dtype=torch.float32, config=QuantizedConfig(64, 32, 4))
            torch.testing.assert_close(got, dequantize(weight).t(), rtol=2e-7, atol=0)


@forms
def test_a_dense_copy_has_the_same_numbers(form):
    for size_out, size_in in ((34, 200), (40, 1100)):
        weight = some_weight(form, size_out, size_in)
        torch.testing.assert_close(dequantize_triton(weight, torch.float32), dequantize(weight), rtol=1e-6, atol=1e-7)


def test_forms_without_kernels_are_refused():
    codes = torch.zeros(4, 96, dtype=torch.uint8)
    for group in (16, 48, 192):
        with pytest.raises(ValueError, match=f"no groups of {group} columns"):
            quantized_weight("uint4", codes, torch.ones(4, -(-96 // group)), group=group)
