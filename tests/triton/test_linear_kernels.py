"""Kernels of linear layers against their torch twins in float64, with every buffer poisoned before it is written."""

import pytest
import torch

from runtime.kernels.linear import batch_invariant_linear
from runtime.kernels.linear.batch_invariant_linear import (
    batch_invariant_linear_torch,
    batch_invariant_linear_triton,
)
from runtime.kernels.linear.skinny_gemm import skinny_gemm_torch, skinny_gemm_triton
from runtime.kernels.linear.tiles import Tiling

FORMS = (
    {},
    {"bias": 1},
    {"norm": 1, "activation": "silu"},
    {"norm": 1, "bias": 1, "activation": "gelu_tanh"},
    {"bias": 1, "residual": 1},
    {"norm": 1, "out_dtype": torch.float32},
)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16])


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element of a new tensor is NaN until it is written."""

    def empty(*shape, **options):
        return torch.full(shape[0] if isinstance(shape[0], tuple) else shape, torch.nan, **options)

    torch.manual_seed(0)
    monkeypatch.setattr(torch, "empty", empty)


def rand(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def check(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, *what: object) -> None:
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error < {torch.float32: 1e-6, torch.float16: 2e-3}[dtype], (dtype, error, *what)


@dtypes
@pytest.mark.parametrize(
    ("rows", "size_out", "size_in"),
    [(1, 8, 16), (1, 50, 576), (3, 30, 100), (2, 70, 1030), (16, 18, 7), (5, 36, 2100)],
)
def test_skinny_gemm(dtype, rows, size_out, size_in):
    for form in FORMS:
        x, weight = rand(dtype, rows, size_in + 3)[:, :size_in], rand(dtype, size_out, size_in) * size_in**-0.5
        options = {k: v for k, v in form.items() if k in ("activation", "out_dtype")} | {"eps": 1e-5}
        options |= {"norm_weight": rand(dtype, size_in)} if "norm" in form else {}
        options |= {"residual": rand(dtype, rows, size_out)} if "residual" in form else {}
        options |= {"bias": rand(dtype, size_out)} if "bias" in form else {}
        wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        wide["out_dtype"] = None
        want = skinny_gemm_torch(x.double(), weight.double(), **wide)
        fixed_order = {"fixed_order": len(form) % 2 == 1}
        got = skinny_gemm_triton(x, weight, **options, **fixed_order)
        assert got.dtype == options.get("out_dtype", dtype)
        assert "residual" not in options or got is options["residual"]
        if "residual" not in options:
            out = torch.full_like(got, torch.nan)
            assert skinny_gemm_triton(x, weight, **options, **fixed_order, out=out) is out
            assert torch.equal(out, got)
        check(got, want, dtype, form)


@dtypes
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "size_out", "size_in"), [(1, 8, 16), (3, 50, 576), (70, 130, 1030), (200, 64, 2100), (0, 8, 16)]
)
def test_batch_invariant_linear(dtype, rows, size_out, size_in, with_bias):
    x, weight = rand(dtype, rows, size_in + 3)[:, :size_in], rand(dtype, size_out, size_in)
    arguments = (x, weight, rand(dtype, size_out)) if with_bias else (x, weight)
    got = batch_invariant_linear_triton(*arguments)
    want = batch_invariant_linear_torch(*(a.double() for a in arguments))
    out = torch.full((rows, size_out), torch.nan)
    assert batch_invariant_linear_triton(*arguments, out_dtype=torch.float32, out=out) is out
    residual = rand(dtype, rows, size_out)
    total = want + residual.double()
    assert batch_invariant_linear_triton(*arguments, residual=residual) is residual
    if rows:
        check(got, want, dtype)
        check(out, want, dtype, "out")
        check(residual, total, dtype, "residual")


@pytest.mark.parametrize("tiling", [Tiling(16, 32, 32, 4, 2), Tiling(32, 16, 64, 4, 2, split=2)])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("size_in", [1030, 2048, 2104])  # tiles by addresses, and by descriptors
def test_tilings(monkeypatch, tiling, swap, size_in):
    monkeypatch.setattr(batch_invariant_linear, "choose_tiling", lambda *_: tiling._replace(swap=swap))
    x, weight = rand(torch.float16, 20, size_in), rand(torch.float16, 50, size_in)
    bias, residual = rand(torch.float16, 50), rand(torch.float16, 20, 50)
    want = batch_invariant_linear_torch(x.double(), weight.double(), bias.double(), residual=residual.double())
    for _ in range(2):  # counters are zeros again
        got = batch_invariant_linear_triton(x, weight, bias, residual=residual.clone())
        check(got, want, torch.float16, tiling, swap)
