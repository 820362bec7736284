"""Linear layers for GPUs: torch forms against plain formulas."""

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
