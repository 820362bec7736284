"""Linear layers for GPUs: torch forms against plain formulas."""

import pytest
import torch

from runtime.kernels.linear.batch_invariant_linear import choose_tiling
from runtime.kernels.linear.skinny_gemm import skinny_gemm_config, skinny_gemm_torch
from runtime.kernels.linear.skinny_gemm_configs import SKINNY_GEMM_CONFIGS
from runtime.kernels.linear.split_k import MAX_SPLIT_TILES
from runtime.kernels.linear.sum_order import sum_order


def test_folded_steps_equal_plain_steps():
    x, weight, norm, residual = torch.randn(3, 24), torch.randn(20, 24), torch.randn(24), torch.randn(3, 20)
    bias = torch.randn(20)
    normed = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm
    product = normed @ weight.T + bias
    torch.testing.assert_close(skinny_gemm_torch(x, weight, bias, norm_weight=norm, eps=1e-5), product)
    gate, up = product[:, :10], product[:, 10:]
    silu, gelu = gate * torch.sigmoid(gate), torch.nn.functional.gelu(gate, approximate="tanh")
    clamped = gate.clamp(max=7.0)
    clamped = clamped * torch.sigmoid(1.702 * clamped) * (up.clamp(-7.0, 7.0) + 1.0)
    for activation, gated in (("silu", silu * up), ("gelu_tanh", gelu * up), ("swiglu_clamped", clamped)):
        got = skinny_gemm_torch(x, weight, bias, norm_weight=norm, eps=1e-5, activation=activation)
        torch.testing.assert_close(got, gated)
    want = residual + x @ weight.T
    assert skinny_gemm_torch(x, weight, residual=residual) is residual
    torch.testing.assert_close(residual, want)
    assert skinny_gemm_torch(x.bfloat16(), weight.bfloat16(), out_dtype=torch.float32).dtype == torch.float32


SHAPES = [(3072, 2048), (128256, 4096), (2048, 8192), (4096, 14336), (576, 576), (49152, 576), (1002, 1160), (8, 16)]
shapes = pytest.mark.parametrize(("size_out", "size_in"), SHAPES + [key[:2] for key in SKINNY_GEMM_CONFIGS])


@shapes
def test_configurations_suit_the_kernels(size_out, size_in):
    num_chunks, chunk = sum_order(size_out, size_in)
    for rows in (1, 2, 8, 9, 16):
        config = skinny_gemm_config(size_out, size_in, rows)
        assert config.block_n % (2 if rows == 1 else 16) == 0  # gate and up rows in pairs; rows of a matrix instruction
        assert rows == 1 or chunk % config.block_k == 0
        assert rows == 1 or num_chunks == 1 or num_chunks % config.num_warps == 0


@shapes
def test_chunks_cover_the_weight_for_any_number_of_rows(size_out, size_in):
    order = sum_order(size_out, size_in)
    assert order.num_chunks in (1, 2, 4)
    assert (order.num_chunks - 1) * order.chunk < size_in <= order.num_chunks * order.chunk
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (17, 64, 65, 128, 129, 256, 257, 1000, 8192):
            tiling = choose_tiling(rows, size_out, order, dtype)
            assert order.chunk % tiling.block_k == 0
            assert tiling.split in (1, order.num_chunks)
            tiles = -(-rows // tiling.block_m) * -(-size_out // tiling.block_n)
            assert tiles <= MAX_SPLIT_TILES or tiling.split == 1
