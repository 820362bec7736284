"""Kernels that convert whole weights: a dense one to fp8, and a quantized one to dense."""

from __future__ import annotations

import torch

from runtime.kernels.magnitudes import larger, largest_magnitude, to_e4m3
from runtime.kernels.quantized.quantized_weight import QuantizedWeight
from runtime.kernels.quantized.upcast import upcast_bytes, upcast_nibbles
from runtime.kernels.quantized.wna16_step import step_columns
from runtime.kernels.triton_language import jit, next_power_of_2, tl

MAX_COLUMNS = 32768  # a program holds a whole row in registers


@jit
def _quantize_fp8_weight_kernel(
    dense_ptr,  # [num_rows, K], rows stride apart
    values_ptr,  # [num_rows, K] contiguous
    scales_ptr,  # [num_rows]
    stride,
    K,
    SMALLEST: tl.constexpr,  # scale
    GREATEST: tl.constexpr,  # candidates for the greatest magnitude's value
    BLOCK: tl.constexpr,
):
    """Program i: row i. Errors are summed in float64, so that every device chooses the same scale."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < K
    x = tl.load(dense_ptr + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    greatest = largest_magnitude(x, 0)
    best = greatest * float("nan")  # stays NaN if a number is not finite
    least = tl.full((), float("inf"), tl.float64)
    for i in tl.static_range(len(GREATEST)):
        scale = larger(tl.div_rn(greatest, GREATEST[i]), SMALLEST)
        rounding = to_e4m3(tl.div_rn(x, tl.broadcast_to(scale, x.shape))).to(tl.float32) * scale - x
        error = tl.sum((rounding * rounding).to(tl.float64), axis=0)
        best = tl.where(error < least, scale, best)
        least = tl.minimum(least, error)
    tl.store(scales_ptr + row, best)
    tl.store(values_ptr + row * K + cols, to_e4m3(tl.div_rn(x, tl.broadcast_to(best, x.shape))), mask=inside)


def quantize_fp8_weight_triton(
    dense: torch.Tensor,  # [num_rows, K], K up to MAX_COLUMNS
    greatest: tuple[float, ...],
    smallest: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values [num_rows, K] and scales [num_rows, 1] with each row's least squared error.

    The candidate scales map the row's greatest magnitude to one value in `greatest`; they are at least `smallest`.
    The twin is `Float8.encode` (runtime/quant/encodings.py)."""
    num_rows, size = dense.shape
    values = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=dense.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=dense.device)
    if num_rows:
        block = next_power_of_2(size)
        _quantize_fp8_weight_kernel[(num_rows,)](
            dense, values, scales, dense.stride(0), size, SMALLEST=smallest, GREATEST=greatest, BLOCK=block,
            num_warps=min(max(block // 512, 1), 16 if block <= 16384 else 32),
        )  # fmt: skip
    return values, scales


@jit
def _dequantize_kernel(
    values_ptr,
    scales_ptr,
    zero_points_ptr,
    out_ptr,  # [N, K] contiguous
    N,
    K: tl.constexpr,
    LAYOUT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (i, j): weight rows from i * BLOCK_N, columns from j * BLOCK_K."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_of = tl.minimum(rows, N - 1).to(tl.int64)[:, None]
    ROW_BYTES: tl.constexpr = K // 2 if LAYOUT.plane else K
    WIDTH: tl.constexpr = LAYOUT.plane if LAYOUT.plane else BLOCK_K
    OFFSET: tl.constexpr = 136 if LAYOUT.encoding == "int4" else 128
    start = tl.program_id(1) * BLOCK_K
    cols = tl.arange(0, WIDTH)[None, :]
    place = (start // 2 if LAYOUT.plane else start) + cols
    w = tl.load(values_ptr + row_of * ROW_BYTES + place, mask=place < ROW_BYTES, other=0.0)
    scales, zero_points = scales_ptr + row_of // LAYOUT.scale_rows, zero_points_ptr + row_of // LAYOUT.scale_rows
    out, inside = out_ptr + row_of * K, (rows < N)[:, None]
    if LAYOUT.plane:
        low, high = upcast_nibbles(w, LAYOUT, tl.float32)
        if LAYOUT.encoding == "int4" or LAYOUT.encoding == "uint4":
            low, high = low.to(tl.float32) - OFFSET, high.to(tl.float32) - OFFSET
        _store_numbers(low, start, scales, zero_points, out, inside, K, LAYOUT)
        _store_numbers(high, start + LAYOUT.plane, scales, zero_points, out, inside, K, LAYOUT)
    else:
        _store_numbers(upcast_bytes(w, LAYOUT, tl.float32), start, scales, zero_points, out, inside, K, LAYOUT)


@jit
def _store_numbers(numbers, start, scales, zero_points, out, inside, K: tl.constexpr, LAYOUT: tl.constexpr):
    """Scale upcast numbers of columns from `start` on, subtract their zero points, and store them."""
    cols = start + tl.arange(0, numbers.shape[1])[None, :]
    at = start // LAYOUT.group_size * LAYOUT.scale_stride if LAYOUT.group_size else 0
    if LAYOUT.group_size and numbers.shape[1] > LAYOUT.group_size:
        at = cols // LAYOUT.group_size * LAYOUT.scale_stride
    numbers = numbers.to(tl.float32) * tl.load(scales + at)
    if LAYOUT.has_zero_points:
        numbers -= tl.load(zero_points + at)
    tl.store(out + cols, numbers.to(out.dtype.element_ty), mask=inside & (cols < K))


def dequantize_triton(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """`dequantize_torch` as one kernel."""
    size_out, size_in = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.values.device)
    block_n, block_k = 32, step_columns(weight, 128)
    _dequantize_kernel[(-(-size_out // block_n), -(-size_in // block_k))](
        weight.values, weight.scales, weight.zero_points_or_scales, out, size_out,
        K=size_in, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, LAYOUT=weight.layout,
    )  # fmt: skip
    return out
