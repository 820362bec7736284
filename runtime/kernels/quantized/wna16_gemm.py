"""Products for any number of rows with quantized weights (4 or 8 bits) and 16-bit activations, upcast in registers.

Serving uses it from 17 rows up to 64 where no faster kernel takes the weight. Deterministic mode uses it for every
number of rows. Weight rows are the matrix instruction's rows, and chunks follow `wna16_sum_order`: with
`fixed_order` a row has the bits that `wna16_skinny_gemm` gives it. Where too few programs would read the weight, chunks
are computed side by side, and the last program adds them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.kernels.linear.split_k import MAX_SPLIT_TILES, add_parts, split_counters, store_part
from runtime.kernels.linear.sum_order import SumOrder
from runtime.kernels.linear.tiles import Tiling, output_of
from runtime.kernels.quantized.launch_configs import wna16_sum_order, wna16_tiling
from runtime.kernels.quantized.quantized_weight import QuantizedWeight, dequantize_torch
from runtime.kernels.quantized.wna16_step import add_step, load_scales, load_values, load_x, step_columns
from runtime.kernels.triton_language import jit, tl, use_pdl

MAX_TILE_ROWS = 64  # a dense copy of the weight costs less time than tiles that upcast it


def wna16_gemm_torch(
    x: torch.Tensor,  # [num_rows, K]
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias -> [num_rows, N], or the residual plus that."""
    y = F.linear(x, dequantize_torch(weight, x.dtype), bias)
    if residual is not None:
        return residual.add_(y)
    return y.to(out_dtype or x.dtype) if out is None else out.copy_(y)


@jit(do_not_specialize=["num_rows"])
def _wna16_gemm_kernel(
    x_ptr,  # [num_rows, K], rows x_stride apart
    values_ptr,
    scales_ptr,
    zero_points_ptr,
    bias_ptr,
    out_ptr,  # [num_rows, N] contiguous
    sums_ptr,  # [NUM_CHUNKS, num_rows, N] fp32, used with SPLIT
    counters_ptr,  # [tiles] int32 zeros, used with SPLIT
    x_stride,
    num_rows,
    N,
    K: tl.constexpr,
    LAYOUT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, j): tile i, and chunk j with SPLIT, else all chunks. Tiles of the same weights are neighbours."""
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tokens = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    row_of = tl.minimum(rows, N - 1).to(tl.int64)
    ROW_BYTES: tl.constexpr = K // 2 if LAYOUT.plane else K
    WIDTH: tl.constexpr = LAYOUT.plane if LAYOUT.plane else BLOCK_K
    cols = tl.arange(0, WIDTH)[None, :]
    values = values_ptr + row_of[:, None] * ROW_BYTES + cols
    xs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols
    live = (tokens < num_rows)[:, None]
    groups = tl.zeros((1, 1), tl.int32)
    scales = scales_ptr + (row_of // LAYOUT.scale_rows)[:, None]
    zero_points = zero_points_ptr + (row_of // LAYOUT.scale_rows)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = _chunk(
        values, xs, scales, zero_points, cols, groups, live, tl.program_id(1) * CHUNK, K, LAYOUT, CHUNK, BLOCK_M,
        BLOCK_N, BLOCK_K, ROW_BYTES, STAGES,
    )  # fmt: skip
    if not SPLIT:
        for first in tl.range(CHUNK, K, CHUNK):
            total += _chunk(
                values, xs, scales, zero_points, cols, groups, live, first, K, LAYOUT, CHUNK, BLOCK_M, BLOCK_N, BLOCK_K,
                ROW_BYTES, STAGES,
            )  # fmt: skip
    at = tokens.to(tl.int64)[None, :] * N + rows[:, None]
    inside = (tokens < num_rows)[None, :] & (rows < N)[:, None]
    if SPLIT:
        size = num_rows.to(tl.int64) * N
        if store_part(sums_ptr, size, at, total, inside, counters_ptr) != NUM_CHUNKS - 1:
            return
        total = add_parts(sums_ptr, size, at, inside, counters_ptr, NUM_CHUNKS)
    if not LAYOUT.group_size:
        total *= tl.load(scales_ptr + row_of)[:, None]
    if BIAS:
        total += tl.load(bias_ptr + row_of).to(tl.float32)[:, None]
    if RESIDUAL:
        total += tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _chunk(
    values, xs, scales, zero_points, cols, groups, live, first,
    K: tl.constexpr, LAYOUT: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ROW_BYTES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns first to first + CHUNK of the tile's product, float32 [BLOCK_N, BLOCK_M]."""
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    WHOLE: tl.constexpr = K % CHUNK == 0
    for start in tl.range(first, first + CHUNK, BLOCK_K, num_stages=STAGES):
        w = load_values(values, cols, start // 2 if LAYOUT.plane else start, ROW_BYTES, WHOLE)
        x = load_x(xs, xs, cols, live, start, K, LAYOUT, False, WHOLE)
        step_scales = load_scales(scales, zero_points, groups, start, K, LAYOUT, WHOLE)
        acc = add_step(w, x, step_scales, acc, LAYOUT, 1)
    return acc


def wna16_gemm_triton(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    fixed_order: bool = False,  # a row has the bits that few rows of that order have
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`wna16_gemm_torch` with fp32 sums."""
    num_rows, (size_out, size_in) = len(x), weight.shape
    out = output_of(x, size_out, out_dtype, out, residual)
    if not num_rows:
        return out
    tiling, pdl = tiling or wna16_tiling(weight, num_rows, fixed_order), use_pdl(x)
    num_tiles = tiling.num_tiles(num_rows, size_out)
    order = SumOrder(1, -(-size_in // 128) * 128)
    if fixed_order or tiling.split > 1:
        order = wna16_sum_order(size_out, size_in)
    split = tiling.split > 1 and order.num_chunks > 1 and num_tiles <= MAX_SPLIT_TILES
    sums, counters = out, out  # the kernel needs pointers, but does not use them without SPLIT
    if split:
        sums = torch.empty((order.num_chunks, num_rows, size_out), dtype=torch.float32, device=x.device)
        counters = split_counters(x.device)
    _wna16_gemm_kernel[(num_tiles, order.num_chunks if split else 1)](
        x, weight.values, weight.scales, weight.zero_points_or_scales, out if bias is None else bias, out, sums,
        counters, x.stride(0), num_rows, size_out, K=size_in, LAYOUT=weight.layout, BIAS=bias is not None,
        RESIDUAL=residual is not None, SPLIT=split, NUM_CHUNKS=order.num_chunks, CHUNK=order.chunk,
        BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_K=step_columns(weight, tiling.block_k),
        STAGES=tiling.stages, PDL=pdl, num_warps=tiling.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
