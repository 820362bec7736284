"""A weight's rows as e4m3 codes, each with the scale of least squared error: `Float8.encode` of rows, read once."""

from __future__ import annotations

import torch

from runtime.kernels.magnitudes import larger, largest_magnitude, to_e4m3
from runtime.kernels.triton_language import jit, next_power_of_2, tl

MAX_COLUMNS = 32768  # a program has a whole row in its registers


@jit
def _quantize_fp8_weight_kernel(
    dense_ptr,  # [num_rows, K], rows stride apart
    codes_ptr,  # [num_rows, K] contiguous
    scales_ptr,  # [num_rows]
    stride,
    K,
    SMALLEST: tl.constexpr,  # scale
    GREATEST: tl.constexpr,  # the codes that the greatest magnitude may become
    BLOCK: tl.constexpr,
):
    """Program i: row i. Errors are summed in float64, so that every device chooses alike."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < K
    x = tl.load(dense_ptr + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    greatest = largest_magnitude(x, 0)
    best = greatest * float("nan")  # it stays so where a number is not finite
    least = tl.full((), float("inf"), tl.float64)
    for i in tl.static_range(len(GREATEST)):
        scale = larger(tl.div_rn(greatest, GREATEST[i]), SMALLEST)
        rounding = to_e4m3(tl.div_rn(x, tl.broadcast_to(scale, x.shape))).to(tl.float32) * scale - x
        error = tl.sum((rounding * rounding).to(tl.float64), axis=0)
        best = tl.where(error < least, scale, best)
        least = tl.minimum(least, error)
    tl.store(scales_ptr + row, best)
    tl.store(codes_ptr + row * K + cols, to_e4m3(tl.div_rn(x, tl.broadcast_to(best, x.shape))), mask=inside)


def quantize_fp8_weight_triton(
    dense: torch.Tensor,  # [num_rows, K], K up to MAX_COLUMNS
    greatest: tuple[float, ...],
    smallest: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [num_rows, K] and scales [num_rows, 1]: of the scales, at least `smallest`, with which a row's greatest
    magnitude becomes one of the codes `greatest`, the first with the least squared error."""
    num_rows, size = dense.shape
    codes = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=dense.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=dense.device)
    if num_rows:
        block = next_power_of_2(size)
        _quantize_fp8_weight_kernel[(num_rows,)](
            dense, codes, scales, dense.stride(0), size, SMALLEST=smallest, GREATEST=greatest, BLOCK=block,
            num_warps=min(max(block // 512, 1), 16 if block <= 16384 else 32),
        )  # fmt: skip
    return codes, scales
