"""Products for any number of rows with quantized weights (4 or 8 bits) and 16-bit activations, upcast in registers.

Serving uses it from 17 rows up to 64 where no faster kernel takes the weight. Deterministic mode uses it for every
number of rows. Weight rows are the matrix instruction's rows, and chunks follow `wna16_sum_order`: with
`fixed_order` a row has the bits that `wna16_skinny_gemm` gives it. Where too few programs would read the weight, chunks
are computed side by side, and the last program adds them.
"""

from __future__ import annotations

from typing import NamedTuple

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


class WnaGemmForm(NamedTuple):
    """Constants of `_wna16_gemm_kernel`."""

    k: int
    bias: bool
    residual: bool
    split: bool
    num_chunks: int
    chunk: int
    block_m: int
    block_n: int
    block_k: int
    stages: int
    pdl: bool


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
    FORM: tl.constexpr,  # `WnaGemmForm`
    LAYOUT: tl.constexpr,
):
    """Program (i, j): tile i, and chunk j with SPLIT, else all chunks. Tiles of the same weights are neighbours."""
    tiles_m = tl.cdiv(num_rows, FORM.block_m)
    tokens = tl.program_id(0) % tiles_m * FORM.block_m + tl.arange(0, FORM.block_m)
    rows = tl.program_id(0) // tiles_m * FORM.block_n + tl.arange(0, FORM.block_n)
    row_of = tl.minimum(rows, N - 1).to(tl.int64)
    ROW_BYTES: tl.constexpr = FORM.k // 2 if LAYOUT.plane else FORM.k
    WIDTH: tl.constexpr = LAYOUT.plane if LAYOUT.plane else FORM.block_k
    cols = tl.arange(0, WIDTH)[None, :]
    values = values_ptr + row_of[:, None] * ROW_BYTES + cols
    xs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols
    live = (tokens < num_rows)[:, None]
    groups = tl.zeros((1, 1), tl.int32)
    scales = scales_ptr + (row_of // LAYOUT.scale_rows)[:, None]
    zero_points = zero_points_ptr + (row_of // LAYOUT.scale_rows)[:, None]
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = _chunk(
        values, xs, scales, zero_points, cols, groups, live, tl.program_id(1) * FORM.chunk, FORM, LAYOUT, ROW_BYTES
    )
    if not FORM.split:
        for first in tl.range(FORM.chunk, FORM.k, FORM.chunk):
            total += _chunk(values, xs, scales, zero_points, cols, groups, live, first, FORM, LAYOUT, ROW_BYTES)
    at = tokens.to(tl.int64)[None, :] * N + rows[:, None]
    inside = (tokens < num_rows)[None, :] & (rows < N)[:, None]
    if FORM.split:
        size = num_rows.to(tl.int64) * N
        if store_part(sums_ptr, size, at, total, inside, counters_ptr) != FORM.num_chunks - 1:
            return
        total = add_parts(sums_ptr, size, at, inside, counters_ptr, FORM.num_chunks)
    if not LAYOUT.group_size:
        total *= tl.load(scales_ptr + row_of)[:, None]
    if FORM.bias:
        total += tl.load(bias_ptr + row_of).to(tl.float32)[:, None]
    if FORM.residual:
        total += tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _chunk(
    values, xs, scales, zero_points, cols, groups, live, first, FORM: tl.constexpr, LAYOUT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
):  # fmt: skip
    """Columns first to first + CHUNK of the tile's product, float32 [BLOCK_N, BLOCK_M]."""
    acc = tl.full((FORM.block_n, FORM.block_m), 0, tl.float32)
    WHOLE: tl.constexpr = FORM.k % FORM.chunk == 0
    for start in tl.range(first, first + FORM.chunk, FORM.block_k, num_stages=FORM.stages):
        w = load_values(values, cols, start // 2 if LAYOUT.plane else start, ROW_BYTES, WHOLE)
        x = load_x(xs, xs, cols, live, start, FORM.k, LAYOUT, False, WHOLE)
        step_scales = load_scales(scales, zero_points, groups, start, FORM.k, LAYOUT, WHOLE)
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
        counters, x.stride(0), num_rows, size_out,
        FORM=WnaGemmForm(
            k=size_in, bias=bias is not None, residual=residual is not None, split=split, num_chunks=order.num_chunks,
            chunk=order.chunk, block_m=tiling.block_m, block_n=tiling.block_n,
            block_k=step_columns(weight, tiling.block_k), stages=tiling.stages, pdl=pdl,
        ),
        LAYOUT=weight.layout, num_warps=tiling.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out
