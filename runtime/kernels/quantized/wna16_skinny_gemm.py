"""Products for up to 16 rows with quantized weights (4 or 8 bits) and 16-bit activations.

Reading and upcasting the weight takes most of the time. As in `linear/skinny_gemm.py`, a program has a few
weight rows and the whole of K, and requests its first weights before it waits for the previous kernel. K's chunks are
summed in the order of `wna16_sum_order`. One row has a kernel without matrix units for encodings that can be multiplied
without an upcast (`wna16_gemv.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from runtime.kernels.linear.skinny_blocks import add_chunks, store_block, weight_rows_of_block
from runtime.kernels.linear.skinny_gemm import skinny_gemm_torch
from runtime.kernels.linear.tiles import output_of
from runtime.kernels.norm.gated_activation import Activation
from runtime.kernels.norm.rms_norm import rms_norm_triton
from runtime.kernels.quantized.launch_configs import (
    GemvConfig,
    Wna16SkinnyConfig,
    gemv_config,
    row_words,
    wna16_skinny_config,
    wna16_sum_order,
)
from runtime.kernels.quantized.quantized_weight import QuantizedWeight, dequantize_torch
from runtime.kernels.quantized.wna16_gemv import GEMV_ENCODINGS, wna16_gemv_kernel
from runtime.kernels.quantized.wna16_step import add_step, load_scales, load_values, load_x, step_columns
from runtime.kernels.triton_language import jit, next_power_of_2, tl, use_pdl


def wna16_skinny_gemm_torch(
    x: torch.Tensor,  # [num_rows, K]
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    **options: Any,  # `skinny_gemm_torch`'s
) -> torch.Tensor:
    """`skinny_gemm_torch` with the dequantized weight, rounded to x's dtype."""
    return skinny_gemm_torch(x, dequantize_torch(weight, x.dtype), bias, **options)


@jit(do_not_specialize=["num_rows"])
def _wna16_skinny_gemm_kernel(
    x_ptr,  # [num_rows, K], rows x_stride apart
    values_ptr,  # this and the next two as in `QuantizedWeight`
    scales_ptr,
    zero_points_ptr,
    bias_ptr,  # [N]; read with BIAS, as are the next two with NORM and RESIDUAL
    norm_ptr,  # [K]
    residual_ptr,  # [num_rows, N] contiguous
    out_ptr,  # [num_rows, N] contiguous, or N // 2 columns with ACTIVATION
    x_stride,
    num_rows,
    N,
    eps,
    K: tl.constexpr,
    LAYOUT: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,  # one row only
    ROW: tl.constexpr,  # power of two, at least K
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,  # 1, 2, 4 or 8
    CHUNK: tl.constexpr,  # columns; a multiple of BLOCK_K
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # columns per step in each chunk: `step_columns`
    NUM_TOKENS: tl.constexpr,  # 8 or 16, at least num_rows
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # steps, 1 or 2
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program i: weight rows from i * BLOCK_N with all rows of x, padded to NUM_TOKENS."""
    rows = weight_rows_of_block(tl.program_id(0), N, ACTIVATION, BLOCK_N)
    tokens = tl.arange(0, NUM_TOKENS)
    row_of = tl.minimum(rows, N - 1).to(tl.int64)
    ROW_BYTES: tl.constexpr = K // 2 if LAYOUT.plane else K
    WIDTH: tl.constexpr = LAYOUT.plane if LAYOUT.plane else BLOCK_K  # columns per product
    PER_BYTE: tl.constexpr = 2 if LAYOUT.plane else 1
    if NUM_CHUNKS == 1:
        place = tl.arange(0, WIDTH)[None, :]
        cols = place
        values = values_ptr + row_of[:, None] * ROW_BYTES + place  # [BLOCK_N, WIDTH]
        xs = x_ptr + (tokens * x_stride)[:, None] + cols  # [NUM_TOKENS, WIDTH]
        live = (tokens < num_rows)[:, None]
        groups = tl.zeros((1, 1), tl.int32)
        scale_rows = (row_of // LAYOUT.scale_rows)[:, None]
        acc = tl.zeros((BLOCK_N, NUM_TOKENS), tl.float32)
    else:
        chunks = tl.arange(0, NUM_CHUNKS)[:, None, None]
        place = chunks * (CHUNK // PER_BYTE) + tl.arange(0, WIDTH)[None, None, :]
        cols = chunks * CHUNK + tl.arange(0, WIDTH)[None, None, :]
        values = values_ptr + row_of[None, :, None] * ROW_BYTES + place  # [NUM_CHUNKS, BLOCK_N, WIDTH]
        xs = x_ptr + (tokens * x_stride)[None, :, None] + cols
        live = (tokens < num_rows)[None, :, None]
        groups = chunks * (CHUNK // LAYOUT.group_size if LAYOUT.group_size else 0)
        scale_rows = (row_of // LAYOUT.scale_rows)[None, :, None]
        acc = tl.zeros((NUM_CHUNKS, BLOCK_N, NUM_TOKENS), tl.float32)
    norms = norm_ptr + tl.zeros_like(tokens)[:, None] + cols  # x's shape, as smaller loads are not asynchronous
    scales = scales_ptr + groups * LAYOUT.scale_stride + scale_rows
    zero_points = zero_points_ptr + groups * LAYOUT.scale_stride + scale_rows

    TAIL: tl.constexpr = CHUNK - AHEAD * BLOCK_K
    SECOND: tl.constexpr = CHUNK - 2 * BLOCK_K
    LAST: tl.constexpr = CHUNK - BLOCK_K
    WHOLE: tl.constexpr = K == NUM_CHUNKS * CHUNK
    # The last steps' weights come first, so that they and the loop's loads do not wait for one another.
    last_w = load_values(values, place, LAST // PER_BYTE, ROW_BYTES, WHOLE)
    last_scales = load_scales(scales, zero_points, groups, LAST, K, LAYOUT, WHOLE)
    if AHEAD == 2:
        second_w = load_values(values, place, SECOND // PER_BYTE, ROW_BYTES, WHOLE)
        second_scales = load_scales(scales, zero_points, groups, SECOND, K, LAYOUT, WHOLE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if NORM:  # used after the loop: nothing before it waits
        at = tl.arange(0, ROW)
        row = tl.load(x_ptr + at, mask=at < K, other=0.0)
    else:
        last_x = load_x(xs, norms, cols, live, LAST, K, LAYOUT, NORM, WHOLE)
        if AHEAD == 2:
            second_x = load_x(xs, norms, cols, live, SECOND, K, LAYOUT, NORM, WHOLE)
    for start in tl.range(0, TAIL, BLOCK_K, num_stages=STAGES, loop_unroll_factor=UNROLL):
        w = load_values(values, place, start // PER_BYTE, ROW_BYTES, WHOLE)
        x = load_x(xs, norms, cols, live, start, K, LAYOUT, NORM, WHOLE)
        step_scales = load_scales(scales, zero_points, groups, start, K, LAYOUT, WHOLE)
        acc = add_step(w, x, step_scales, acc, LAYOUT, NUM_CHUNKS)
    if NORM:
        last_x = load_x(xs, norms, cols, live, LAST, K, LAYOUT, NORM, WHOLE)
        if AHEAD == 2:
            second_x = load_x(xs, norms, cols, live, SECOND, K, LAYOUT, NORM, WHOLE)
    if AHEAD == 2:
        acc = add_step(second_w, second_x, second_scales, acc, LAYOUT, NUM_CHUNKS)
    acc = add_step(last_w, last_x, last_scales, acc, LAYOUT, NUM_CHUNKS)
    acc = add_chunks(acc, NUM_CHUNKS)
    if not LAYOUT.group_size:
        acc *= tl.load(scales_ptr + row_of)[:, None]
    if NORM:
        wide = row.to(tl.float32)
        acc *= tl.rsqrt(tl.sum(wide * wide) / K + eps)
    store_block(
        acc, tl.program_id(0), tokens, rows, bias_ptr, residual_ptr, out_ptr, num_rows, N, BIAS, RESIDUAL, ACTIVATION,
        NUM_TOKENS, BLOCK_N,
    )  # fmt: skip


def wna16_skinny_gemm_triton(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    activation: Activation | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    fixed_order: bool = False,  # one row, too, has the bits that it has among others
    config: Wna16SkinnyConfig | GemvConfig | None = None,
) -> torch.Tensor:
    """`wna16_skinny_gemm_torch` as one kernel with fp32 sums; x is bfloat16, its rows may be strided."""
    num_rows, (size_out, size_in) = len(x), weight.shape
    pdl, one_row = use_pdl(x), num_rows == 1 and not fixed_order
    if config is None:
        gemv = one_row and weight.encoding in GEMV_ENCODINGS
        config = gemv_config(weight) if gemv else wna16_skinny_config(weight, 1 if one_row else max(num_rows, 2))
    out = output_of(x, size_out if activation is None else size_out // 2, out_dtype, out, residual)
    bias_of = x if bias is None else bias  # kernels need pointers, but do not read them without their option
    options: dict[str, Any] = {
        "K": size_in, "BIAS": bias is not None, "RESIDUAL": residual is not None, "ACTIVATION": activation,
        "BLOCK_N": config.block_n, "PDL": pdl, "num_warps": config.num_warps, "launch_pdl": pdl,
    }  # fmt: skip
    num_blocks = -(-size_out // config.block_n)
    if isinstance(config, GemvConfig):
        wna16_gemv_kernel[(-(-num_blocks // config.blocks),)](
            x, weight.values, weight.scales, weight.zero_points_or_scales, bias_of,
            x if norm_weight is None else norm_weight, out, out, size_out, eps,
            LAYOUT=weight.layout._replace(table=(), asm=None), NORM=norm_weight is not None, BLOCKS=config.blocks,
            WORDS=row_words(weight), **options,
        )  # fmt: skip
        return out
    if norm_weight is not None and not one_row:
        x, norm_weight = rms_norm_triton(x, norm_weight, eps), None
    num_chunks, chunk = wna16_sum_order(size_out, size_in)
    block_k = step_columns(weight, config.block_k)
    _wna16_skinny_gemm_kernel[(num_blocks,)](
        x, weight.values, weight.scales, weight.zero_points_or_scales, bias_of,
        x if norm_weight is None else norm_weight, out, out, x.stride(0), num_rows, size_out, eps,
        LAYOUT=weight.layout, NORM=norm_weight is not None, NUM_CHUNKS=num_chunks, CHUNK=chunk, BLOCK_K=block_k,
        NUM_TOKENS=8 if num_rows <= 8 else 16, ROW=next_power_of_2(size_in), STAGES=config.stages,
        AHEAD=min(config.ahead, chunk // block_k), UNROLL=config.unroll, **options,
    )  # fmt: skip
    return out
