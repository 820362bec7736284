"""Linear layers for GPUs: torch forms against plain formulas, and Triton kernels under the interpreter."""

import importlib.util

import pytest
import torch

from runtime.kernels.batch_invariant_linear import choose_tiling, chunk_size
from runtime.kernels.skinny_gemm import skinny_gemm_config, skinny_gemm_torch


def test_folded_steps_are_the_plain_ones():
    x, weight, norm, residual = torch.randn(3, 24), torch.randn(20, 24), torch.randn(24), torch.randn(3, 20)
    bias = torch.randn(20)
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm
    product = normed @ weight.T + bias
    torch.testing.assert_close(skinny_gemm_torch(x, weight, bias, norm_weight=norm, eps=1e-5), product)
    gate, up = product[:, :10], product[:, 10:]
    silu, gelu = gate * torch.sigmoid(gate), torch.nn.functional.gelu(gate, approximate="tanh")
    for activation, gated in (("silu", silu * up), ("gelu_tanh", gelu * up)):
        got = skinny_gemm_torch(x, weight, bias, norm_weight=norm, eps=1e-5, activation=activation)
        torch.testing.assert_close(got, gated)
    want = residual + x @ weight.T
    assert skinny_gemm_torch(x, weight, residual=residual) is residual
    torch.testing.assert_close(residual, want)
    assert skinny_gemm_torch(x.bfloat16(), weight.bfloat16(), out_dtype=torch.float32).dtype == torch.float32


INTERPRETED = """
import torch
from runtime.kernels import skinny_gemm, batch_invariant_linear

def poisoned(*shape, **options):  # every element has to be written
    return torch.full(shape[0] if isinstance(shape[0], tuple) else shape, torch.nan, **options)

torch.manual_seed(0)
torch.set_num_threads(1)
torch.empty = poisoned

def check(got, want, dtype, *what):
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error < {torch.float32: 1e-6, torch.float16: 2e-3}[dtype], (dtype, error, *what)

forms = ({}, {"bias": 1}, {"norm": 1, "activation": "silu"}, {"norm": 1, "bias": 1, "activation": "gelu_tanh"},
         {"bias": 1, "residual": 1}, {"norm": 1, "out_dtype": torch.float32})
for dtype in (torch.float32, torch.float16):
    def rand(*shape):
        return torch.randn(*shape).to(dtype)

    for rows, size_out, size_in in ((1, 8, 16), (1, 50, 576), (3, 30, 100), (2, 70, 1030), (16, 18, 7), (5, 36, 2100)):
        for form in forms:
            x, weight = rand(rows, size_in + 3)[:, :size_in], rand(size_out, size_in) * size_in**-0.5
            options = {k: v for k, v in form.items() if k in ("activation", "out_dtype")} | {"eps": 1e-5}
            options |= {"norm_weight": rand(size_in)} if "norm" in form else {}
            options |= {"residual": rand(rows, size_out)} if "residual" in form else {}
            options |= {"bias": rand(size_out)} if "bias" in form else {}
            wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
            wide["out_dtype"] = None
            want = skinny_gemm.skinny_gemm_torch(x.double(), weight.double(), **wide)
            got = skinny_gemm.skinny_gemm_triton(x, weight, **options)
            assert got.dtype == options.get("out_dtype", dtype)
            assert "residual" not in options or got is options["residual"]
            if "residual" not in options:
                out = torch.full_like(got, torch.nan)
                assert skinny_gemm.skinny_gemm_triton(x, weight, **options, out=out) is out
                assert torch.equal(out, got)
            check(got, want, dtype, rows, size_out, size_in, form)

    for rows, size_out, size_in in ((1, 8, 16), (3, 50, 576), (70, 130, 1030), (200, 64, 2100), (0, 8, 16)):
        for with_bias in (False, True):
            x, weight, bias = rand(rows, size_in + 3)[:, :size_in], rand(size_out, size_in), rand(size_out)
            arguments = (x, weight, bias) if with_bias else (x, weight)
            got = batch_invariant_linear.batch_invariant_linear_triton(*arguments)
            want = batch_invariant_linear.batch_invariant_linear_torch(*(a.double() for a in arguments))
            if rows:
                check(got, want, dtype, rows, size_out, size_in, with_bias)
            out = torch.full((rows, size_out), torch.nan)
            given = {"out_dtype": torch.float32, "out": out}
            assert batch_invariant_linear.batch_invariant_linear_triton(*arguments, **given) is out
            residual = rand(rows, size_out)
            total = want + residual.double()
            assert batch_invariant_linear.batch_invariant_linear_triton(*arguments, residual=residual) is residual
            if rows:
                check(out, want, dtype, rows, size_out, size_in, "out")
                check(residual, total, dtype, rows, size_out, size_in, "residual")
print("equal")
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.interpreted("-c", INTERPRETED)
def test_kernels_under_the_interpreter(interpreted):
    assert interpreted.stdout.strip() == "equal", interpreted.stderr[-2000:]


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16])
@pytest.mark.parametrize(
    ("size_out", "size_in"), [(3072, 2048), (128256, 4096), (2048, 8192), (576, 576), (49152, 576)]
)
def test_configurations_suit_the_kernels(size_out, size_in, rows):
    config = skinny_gemm_config(size_out, size_in, rows)
    assert config.block_n % (2 if rows == 1 else 16) == 0  # gate and up rows in pairs; rows of a matrix instruction
    assert rows == 1 or config.block_k % (16 * config.num_warps) == 0


@pytest.mark.parametrize(("size_out", "size_in"), [(3072, 2048), (2048, 8192), (4096, 14336), (576, 1536), (8, 16)])
def test_chunks_cover_the_weight_whatever_the_number_of_rows(size_out, size_in):
    chunk = chunk_size(size_out, size_in)
    num_chunks = -(-size_in // chunk)
    assert (num_chunks - 1) * chunk < size_in
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 64, 65, 1000, 8192):
            tiling = choose_tiling(rows, size_out, num_chunks, dtype)
            assert chunk % tiling.block_k == 0
            assert num_chunks > 1 or not tiling.split
