"""Products for up to 16 rows with quantized weights (4 or 8 bits) and 16-bit activations.

Reading and upcasting the weight takes most of the time. As in `linear/skinny_gemm.py`, a program has a few
weight rows and the whole of K, and requests its first weights before it waits for the previous kernel. K's chunks are
summed in the order of `wna16_sum_order`. One row has a kernel without matrix units for encodings that can be multiplied
without an upcast (`wna16_gemv.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from runtime.kernels.quantized.wna16_gemv import GEMV_ENCODINGS, GemvForm, wna16_gemv_kernel
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


class SkinnyForm(NamedTuple):
    """Constants of `_wna16_skinny_gemm_kernel`."""

    pdl: bool
    k: int
    bias: bool
    residual: bool
    block_n: int
    norm: bool  # one row only
    row: int  # power of two, at least K
    num_chunks: int  # 1, 2, 4 or 8
    chunk: int  # columns; a multiple of `block_k`
    block_k: int  # columns per step in each chunk: `step_columns`
    num_tokens: int  # 8 or 16, at least num_rows
    stages: int
    ahead: int  # steps, 1 or 2
    unroll: int


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
    FORM: tl.constexpr,  # `SkinnyForm`
    LAYOUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Program i: weight rows from i * BLOCK_N with all rows of x, padded to NUM_TOKENS."""
    rows = weight_rows_of_block(tl.program_id(0), N, ACTIVATION, FORM.block_n)
    tokens = tl.arange(0, FORM.num_tokens)
    row_of = tl.minimum(rows, N - 1).to(tl.int64)
    ROW_BYTES: tl.constexpr = FORM.k // 2 if LAYOUT.plane else FORM.k
    WIDTH: tl.constexpr = LAYOUT.plane if LAYOUT.plane else FORM.block_k  # columns per product
    PER_BYTE: tl.constexpr = 2 if LAYOUT.plane else 1
    if FORM.num_chunks == 1:
        place = tl.arange(0, WIDTH)[None, :]
        cols = place
        values = values_ptr + row_of[:, None] * ROW_BYTES + place  # [BLOCK_N, WIDTH]
        xs = x_ptr + (tokens * x_stride)[:, None] + cols  # [NUM_TOKENS, WIDTH]
        live = (tokens < num_rows)[:, None]
        groups = tl.zeros((1, 1), tl.int32)
        scale_rows = (row_of // LAYOUT.scale_rows)[:, None]
        acc = tl.full((FORM.block_n, FORM.num_tokens), 0, tl.float32)
    else:
        chunks = tl.arange(0, FORM.num_chunks)[:, None, None]
        place = chunks * (FORM.chunk // PER_BYTE) + tl.arange(0, WIDTH)[None, None, :]
        cols = chunks * FORM.chunk + tl.arange(0, WIDTH)[None, None, :]
        values = values_ptr + row_of[None, :, None] * ROW_BYTES + place  # [NUM_CHUNKS, BLOCK_N, WIDTH]
        xs = x_ptr + (tokens * x_stride)[None, :, None] + cols
        live = (tokens < num_rows)[None, :, None]
        groups = chunks * (FORM.chunk // LAYOUT.group_size if LAYOUT.group_size else 0)
        scale_rows = (row_of // LAYOUT.scale_rows)[None, :, None]
        acc = tl.full((FORM.num_chunks, FORM.block_n, FORM.num_tokens), 0, tl.float32)
    norms = norm_ptr + tl.zeros_like(tokens)[:, None] + cols  # x's shape, as smaller loads are not asynchronous
    scales = scales_ptr + groups * LAYOUT.scale_stride + scale_rows
    zero_points = zero_points_ptr + groups * LAYOUT.scale_stride + scale_rows

    TAIL: tl.constexpr = FORM.chunk - FORM.ahead * FORM.block_k
    SECOND: tl.constexpr = FORM.chunk - 2 * FORM.block_k
    LAST: tl.constexpr = FORM.chunk - FORM.block_k
    WHOLE: tl.constexpr = FORM.k == FORM.num_chunks * FORM.chunk
    # The last steps' weights come first, so that they and the loop's loads do not wait for one another.
    last_w = load_values(values, place, LAST // PER_BYTE, ROW_BYTES, WHOLE)
    last_scales = load_scales(scales, zero_points, groups, LAST, FORM.k, LAYOUT, WHOLE)
    if FORM.ahead == 2:
        second_w = load_values(values, place, SECOND // PER_BYTE, ROW_BYTES, WHOLE)
        second_scales = load_scales(scales, zero_points, groups, SECOND, FORM.k, LAYOUT, WHOLE)
    if FORM.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if FORM.norm:  # used after the loop: nothing before it waits
        at = tl.arange(0, FORM.row)
        row = tl.load(x_ptr + at, mask=at < FORM.k, other=0.0)
    else:
        last_x = load_x(xs, norms, cols, live, LAST, FORM.k, LAYOUT, FORM.norm, WHOLE)
        if FORM.ahead == 2:
            second_x = load_x(xs, norms, cols, live, SECOND, FORM.k, LAYOUT, FORM.norm, WHOLE)
    for start in tl.range(0, TAIL, FORM.block_k, num_stages=FORM.stages, loop_unroll_factor=FORM.unroll):
        w = load_values(values, place, start // PER_BYTE, ROW_BYTES, WHOLE)
        x = load_x(xs, norms, cols, live, start, FORM.k, LAYOUT, FORM.norm, WHOLE)
        step_scales = load_scales(scales, zero_points, groups, start, FORM.k, LAYOUT, WHOLE)
        acc = add_step(w, x, step_scales, acc, LAYOUT, FORM.num_chunks)
    if FORM.norm:
        last_x = load_x(xs, norms, cols, live, LAST, FORM.k, LAYOUT, FORM.norm, WHOLE)
        if FORM.ahead == 2:
            second_x = load_x(xs, norms, cols, live, SECOND, FORM.k, LAYOUT, FORM.norm, WHOLE)
    if FORM.ahead == 2:
        acc = add_step(second_w, second_x, second_scales, acc, LAYOUT, FORM.num_chunks)
    acc = add_step(last_w, last_x, last_scales, acc, LAYOUT, FORM.num_chunks)
    acc = add_chunks(acc, FORM.num_chunks)
    if not LAYOUT.group_size:
        acc *= tl.load(scales_ptr + row_of)[:, None]
    if FORM.norm:
        wide = row.to(tl.float32)
        acc *= tl.rsqrt(tl.sum(wide * wide) / FORM.k + eps)
    store_block(
        acc, tl.program_id(0), tokens, rows, bias_ptr, residual_ptr, out_ptr, num_rows, N, FORM.bias, FORM.residual,
        ACTIVATION, FORM.num_tokens, FORM.block_n,
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
    shared = pdl, size_in, bias is not None, residual is not None, config.block_n, norm_weight is not None
    options: dict[str, Any] = {"ACTIVATION": activation, "num_warps": config.num_warps, "launch_pdl": pdl}
    num_blocks = -(-size_out // config.block_n)
    if isinstance(config, GemvConfig):
        wna16_gemv_kernel[(-(-num_blocks // config.blocks),)](
            x, weight.values, weight.scales, weight.zero_points_or_scales, bias_of,
            x if norm_weight is None else norm_weight, out, out, size_out, eps,
            GemvForm(*shared, config.blocks, row_words(weight)), LAYOUT=weight.layout._replace(table=(), asm=None),
            **options,
        )  # fmt: skip
        return out
    if norm_weight is not None and not one_row:
        x, norm_weight = rms_norm_triton(x, norm_weight, eps), None
        shared = *shared[:-1], False
    num_chunks, chunk = wna16_sum_order(size_out, size_in)
    block_k = step_columns(weight, config.block_k)
    _wna16_skinny_gemm_kernel[(num_blocks,)](
        x, weight.values, weight.scales, weight.zero_points_or_scales, bias_of,
        x if norm_weight is None else norm_weight, out, out, x.stride(0), num_rows, size_out, eps,
        SkinnyForm(
            *shared, next_power_of_2(size_in), num_chunks, chunk, block_k, 8 if num_rows <= 8 else 16, config.stages,
            min(config.ahead, chunk // block_k), config.unroll,
        ),
        LAYOUT=weight.layout, **options,
    )  # fmt: skip
    return out
