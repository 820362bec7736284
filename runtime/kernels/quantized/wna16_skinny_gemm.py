"""`skinny_gemm` for weights that are codes: at most 16 rows, whose time goes into reading and decoding weights.

As there, a program has a few rows of the weight and the whole of K, requests its first weights before it waits for the
kernel before it, and sums in the order of `sum_order`; sums of a group of columns start at zero, are scaled and then
added. Codes become bfloat16 in registers and go through the tensor cores. One row has kernels of its own where codes
can be multiplied as they are (`quantized_vector.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from runtime.kernels.linear.skinny_gemm import _finish, _weight_rows, skinny_gemm_torch
from runtime.kernels.norm.gated_activation import Activation
from runtime.kernels.norm.rms_norm import rms_norm_triton
from runtime.kernels.quantized.launch_configs import (
    GemvConfig,
    Wna16SkinnyConfig,
    gemv_config,
    row_words,
    step_columns,
    wna16_skinny_config,
    wna16_sum_order,
)
from runtime.kernels.quantized.quantized_weight import (
    QuantizedWeight,
    decode,
    dequantize,
    kernel_options,
    negative_offset,
    upcast_nibbles,
)
from runtime.kernels.quantized.wna16_gemv import GEMV_ENCODINGS, wna16_gemv_kernel
from runtime.kernels.triton_language import jit, next_power_of_2, tl, use_pdl


def wna16_skinny_gemm_torch(
    x: torch.Tensor,  # [num_rows, K]
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    **options: Any,  # of `skinny_gemm_torch`
) -> torch.Tensor:
    """`skinny_gemm_torch` with the weight's numbers, rounded to x's dtype."""
    return skinny_gemm_torch(x, dequantize(weight).to(x.dtype), bias, **options)


@jit(do_not_specialize=["num_rows"])
def _wna16_skinny_gemm_kernel(
    x_ptr,  # [num_rows, K], rows x_stride apart
    codes_ptr,  # of `QuantizedWeight`, as are the next two; minimums are read if MINIMUMS
    scales_ptr,
    minimums_ptr,
    bias_ptr,  # [N]; this and the next two are read if BIAS, NORM, RESIDUAL
    norm_ptr,  # [K]
    residual_ptr,  # [num_rows, N] contiguous
    out_ptr,  # [num_rows, N] contiguous, or N // 2 columns with ACTIVATION
    x_stride,
    num_rows,
    N,
    eps,
    K: tl.constexpr,
    FORM: tl.constexpr,
    TABLE: tl.constexpr,
    ASM: tl.constexpr,
    PLANE: tl.constexpr,  # columns between a byte's nibbles; 0: codes of 8 bits
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    MINIMUMS: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,  # of one row only
    ROW: tl.constexpr,  # power of two, at least K
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,  # 1, 2, 4 or 8
    CHUNK: tl.constexpr,  # columns; a multiple of BLOCK_K
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # columns of a step, in each chunk; 2 * PLANE if there are planes, else a group if there are
    NUM_TOKENS: tl.constexpr,  # 8 or 16, at least num_rows
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # steps, 1 or 2
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program i: rows i * BLOCK_N and on of the weight with all rows of x, padded to NUM_TOKENS."""
    rows = _weight_rows(tl.program_id(0), N, ACTIVATION, BLOCK_N)
    tokens = tl.arange(0, NUM_TOKENS)
    row_of = tl.minimum(rows, N - 1).to(tl.int64)
    ROW_BYTES: tl.constexpr = K // 2 if PLANE else K
    WIDTH: tl.constexpr = PLANE if PLANE else BLOCK_K  # columns of a product
    PER_BYTE: tl.constexpr = 2 if PLANE else 1
    if NUM_CHUNKS == 1:
        place = tl.arange(0, WIDTH)[None, :]
        cols = place
        codes = codes_ptr + row_of[:, None] * ROW_BYTES + place  # [BLOCK_N, WIDTH]
        xs = x_ptr + (tokens * x_stride)[:, None] + cols  # [NUM_TOKENS, WIDTH]
        live = (tokens < num_rows)[:, None]
        groups = tl.zeros((1, 1), tl.int32)
        scale_rows = (row_of // SCALE_ROWS)[:, None]
        acc = tl.zeros((BLOCK_N, NUM_TOKENS), tl.float32)
    else:
        chunks = tl.arange(0, NUM_CHUNKS)[:, None, None]
        place = chunks * (CHUNK // PER_BYTE) + tl.arange(0, WIDTH)[None, None, :]
        cols = chunks * CHUNK + tl.arange(0, WIDTH)[None, None, :]
        codes = codes_ptr + row_of[None, :, None] * ROW_BYTES + place  # [NUM_CHUNKS, BLOCK_N, WIDTH]
        xs = x_ptr + (tokens * x_stride)[None, :, None] + cols
        live = (tokens < num_rows)[None, :, None]
        groups = chunks * (CHUNK // GROUP if GROUP else 0)
        scale_rows = (row_of // SCALE_ROWS)[None, :, None]
        acc = tl.zeros((NUM_CHUNKS, BLOCK_N, NUM_TOKENS), tl.float32)
    norms = norm_ptr + tl.zeros_like(tokens)[:, None] + cols  # of x's shape: smaller loads are not asynchronous
    scales = scales_ptr + groups * SCALE_STRIDE + scale_rows
    minimums = minimums_ptr + groups * SCALE_STRIDE + scale_rows

    TAIL: tl.constexpr = CHUNK - AHEAD * BLOCK_K
    SECOND: tl.constexpr = CHUNK - 2 * BLOCK_K
    LAST: tl.constexpr = CHUNK - BLOCK_K
    WHOLE: tl.constexpr = K == NUM_CHUNKS * CHUNK
    # The last steps' weights come first, so that neither they nor the loop's loads wait for one another.
    last_w = _load_codes(codes, place, LAST // PER_BYTE, ROW_BYTES, WHOLE)
    last_scales = _load_scales(scales, minimums, groups, LAST, K, PLANE, GROUP, SCALE_STRIDE, MINIMUMS, WHOLE)
    if AHEAD == 2:
        second_w = _load_codes(codes, place, SECOND // PER_BYTE, ROW_BYTES, WHOLE)
        second_scales = _load_scales(scales, minimums, groups, SECOND, K, PLANE, GROUP, SCALE_STRIDE, MINIMUMS, WHOLE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if NORM:  # used after the loop, so that nothing here waits for it
        at = tl.arange(0, ROW)
        row = tl.load(x_ptr + at, mask=at < K, other=0.0)
    else:
        last_x = _load_x(xs, norms, cols, live, LAST, K, PLANE, NORM, WHOLE)
        if AHEAD == 2:
            second_x = _load_x(xs, norms, cols, live, SECOND, K, PLANE, NORM, WHOLE)
    for start in tl.range(0, TAIL, BLOCK_K, num_stages=STAGES, loop_unroll_factor=UNROLL):
        w = _load_codes(codes, place, start // PER_BYTE, ROW_BYTES, WHOLE)
        x = _load_x(xs, norms, cols, live, start, K, PLANE, NORM, WHOLE)
        step_scales = _load_scales(scales, minimums, groups, start, K, PLANE, GROUP, SCALE_STRIDE, MINIMUMS, WHOLE)
        acc = _add_step(w, x, step_scales, acc, FORM, TABLE, ASM, PLANE, GROUP, MINIMUMS, NUM_CHUNKS)
    if NORM:
        last_x = _load_x(xs, norms, cols, live, LAST, K, PLANE, NORM, WHOLE)
        if AHEAD == 2:
            second_x = _load_x(xs, norms, cols, live, SECOND, K, PLANE, NORM, WHOLE)
    if AHEAD == 2:
        acc = _add_step(second_w, second_x, second_scales, acc, FORM, TABLE, ASM, PLANE, GROUP, MINIMUMS, NUM_CHUNKS)
    acc = _add_step(last_w, last_x, last_scales, acc, FORM, TABLE, ASM, PLANE, GROUP, MINIMUMS, NUM_CHUNKS)
    acc = _sum_chunks(acc, NUM_CHUNKS)
    if not GROUP:
        acc *= tl.load(scales_ptr + row_of)[:, None]
    if NORM:
        wide = row.to(tl.float32)
        acc *= tl.rsqrt(tl.sum(wide * wide) / K + eps)
    _finish(
        acc, tl.program_id(0), tokens, rows, bias_ptr, residual_ptr, out_ptr, num_rows, N, BIAS, RESIDUAL, ACTIVATION,
        NUM_TOKENS, BLOCK_N,
    )  # fmt: skip


@jit
def _sum_chunks(acc, NUM_CHUNKS: tl.constexpr):
    """The sums of chunks [NUM_CHUNKS, BLOCK_N, NUM_TOKENS] added in ascending order."""
    if NUM_CHUNKS == 1:
        total = acc
    elif NUM_CHUNKS == 2:
        first, second = tl.split(tl.permute(acc, (1, 2, 0)))
        total = first + second
    elif NUM_CHUNKS == 4:
        even, odd = tl.split(tl.permute(tl.reshape(acc, (2, 2, acc.shape[1], acc.shape[2])), (2, 3, 0, 1)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        total = ((first + second) + third) + fourth
    else:
        parts = tl.permute(tl.reshape(acc, (2, 2, 2, acc.shape[1], acc.shape[2])), (3, 4, 0, 1, 2))
        even, odd = tl.split(parts)
        low_even, high_even = tl.split(even)  # 0 and 4, 2 and 6
        low_odd, high_odd = tl.split(odd)
        first, fifth = tl.split(low_even)
        third, seventh = tl.split(high_even)
        second, sixth = tl.split(low_odd)
        fourth, eighth = tl.split(high_odd)
        total = ((((((first + second) + third) + fourth) + fifth) + sixth) + seventh) + eighth
    return total


@jit
def _load_codes(codes, place, start, ROW_BYTES: tl.constexpr, WHOLE: tl.constexpr):
    if WHOLE:
        w = tl.load(codes + start, eviction_policy="evict_first")
    else:
        w = tl.load(codes + start, mask=place < ROW_BYTES - start, other=0.0, eviction_policy="evict_first")
    return w


@jit
def _load_x(
    xs, norms, cols, live, start,
    K: tl.constexpr, PLANE: tl.constexpr, NORM: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The columns of x for a step's codes, or those for the low and for the high plane."""
    x = _load_columns(xs, norms, cols, live, start, K, NORM, WHOLE)
    high_x = x
    if PLANE:
        high_x = _load_columns(xs, norms, cols, live, start + PLANE, K, NORM, WHOLE)
    return x, high_x


@jit
def _load_columns(xs, norms, cols, live, start, K: tl.constexpr, NORM: tl.constexpr, WHOLE: tl.constexpr):
    """Columns `start` and on of x for each chunk, times the norm's weights if NORM."""
    mask = live if WHOLE else live & (cols < K - start)
    x = tl.load(xs + start, mask=mask, other=0.0)
    if NORM:
        x *= tl.load(norms + start, mask=mask, other=0.0)
    return x


@jit
def _load_scales(
    scales, minimums, groups, start,
    K: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr, SCALE_STRIDE: tl.constexpr, MINIMUMS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """A step's scale and minimum, then those of the high plane; then of each plane's second group, where it has two."""
    scale, minimum = 1.0, 0.0
    if GROUP:
        group = start // GROUP
        scale = _load_group(scales, groups, group, K, GROUP, SCALE_STRIDE, WHOLE)
        if MINIMUMS:
            minimum = _load_group(minimums, groups, group, K, GROUP, SCALE_STRIDE, WHOLE)
    high_scale, high_minimum = scale, minimum
    if GROUP == PLANE and GROUP:
        high_scale = _load_group(scales, groups, group + 1, K, GROUP, SCALE_STRIDE, WHOLE)
        if MINIMUMS:
            high_minimum = _load_group(minimums, groups, group + 1, K, GROUP, SCALE_STRIDE, WHOLE)
    second_scale, second_minimum, last_scale, last_minimum = scale, minimum, high_scale, high_minimum
    if 2 * GROUP == PLANE and GROUP:
        second_scale = _load_group(scales, groups, group + 1, K, GROUP, SCALE_STRIDE, WHOLE)
        high_scale = _load_group(scales, groups, group + 2, K, GROUP, SCALE_STRIDE, WHOLE)
        last_scale = _load_group(scales, groups, group + 3, K, GROUP, SCALE_STRIDE, WHOLE)
        if MINIMUMS:
            second_minimum = _load_group(minimums, groups, group + 1, K, GROUP, SCALE_STRIDE, WHOLE)
            high_minimum = _load_group(minimums, groups, group + 2, K, GROUP, SCALE_STRIDE, WHOLE)
            last_minimum = _load_group(minimums, groups, group + 3, K, GROUP, SCALE_STRIDE, WHOLE)
    return scale, minimum, high_scale, high_minimum, second_scale, second_minimum, last_scale, last_minimum


@jit
def _load_group(
    shared, groups, group,
    K: tl.constexpr, GROUP: tl.constexpr, SCALE_STRIDE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    at = shared + group * SCALE_STRIDE
    return tl.load(at) if WHOLE else tl.load(at, mask=groups + group < (K + GROUP - 1) // GROUP, other=0.0)


@jit
def _add_step(
    w, x, scales, acc,
    FORM: tl.constexpr, TABLE: tl.constexpr, ASM: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr,
    MINIMUMS: tl.constexpr, NUM_CHUNKS: tl.constexpr,
):  # fmt: skip
    """acc plus the product of a step's codes with x, of `_load_x`, scaled by what `_load_scales` gives."""
    if 2 * GROUP == PLANE and GROUP:  # the columns of a plane's two groups in turn, with zeros for the others
        low, high = upcast_nibbles(w, FORM, TABLE, ASM, x[0].dtype)
        low_x, second_x = _halves(x[0], NUM_CHUNKS)
        high_x, last_x = _halves(x[1], NUM_CHUNKS)
        acc = _add_plane(low, low_x, scales[0], scales[1], acc, FORM, ASM, GROUP, MINIMUMS, NUM_CHUNKS)
        acc = _add_plane(low, second_x, scales[4], scales[5], acc, FORM, ASM, GROUP, MINIMUMS, NUM_CHUNKS)
        acc = _add_plane(high, high_x, scales[2], scales[3], acc, FORM, ASM, GROUP, MINIMUMS, NUM_CHUNKS)
        acc = _add_plane(high, last_x, scales[6], scales[7], acc, FORM, ASM, GROUP, MINIMUMS, NUM_CHUNKS)
    elif PLANE:  # planes of one group are scaled each, too: two short sums take less time than one long one
        low, high = upcast_nibbles(w, FORM, TABLE, ASM, x[0].dtype)
        acc = _add_plane(low, x[0], scales[0], scales[1], acc, FORM, ASM, GROUP, MINIMUMS, NUM_CHUNKS)
        acc = _add_plane(high, x[1], scales[2], scales[3], acc, FORM, ASM, GROUP, MINIMUMS, NUM_CHUNKS)
    else:
        w = decode(w, ASM, x[0].dtype)
        acc = _add_plane(w, x[0], scales[0], scales[1], acc, FORM, ASM, GROUP, MINIMUMS, NUM_CHUNKS)
    return acc


@jit
def _halves(x, NUM_CHUNKS: tl.constexpr):
    """x with zeros in the second, and in the first half of its columns."""
    WIDTH: tl.constexpr = x.shape[1] if NUM_CHUNKS == 1 else x.shape[2]
    cols = tl.arange(0, WIDTH)
    is_first = cols[None, :] < WIDTH // 2 if NUM_CHUNKS == 1 else cols[None, None, :] < WIDTH // 2
    zeros = tl.zeros_like(x)
    return tl.where(is_first, x, zeros), tl.where(is_first, zeros, x)


@jit
def _add_plane(
    w, x, scale, minimum, acc,
    FORM: tl.constexpr, ASM: tl.constexpr, GROUP: tl.constexpr, MINIMUMS: tl.constexpr, NUM_CHUNKS: tl.constexpr,
):  # fmt: skip
    """acc plus the product of decoded columns of one group, if there are groups. What whole numbers are decoded to is
    too large by an offset: the sum begins with that many times the negative sum of x, which minimums multiply, too."""
    OFFSET: tl.constexpr = FORM == "int4" or FORM == "uint4"
    part = tl.zeros_like(acc) if GROUP else acc
    if OFFSET or MINIMUMS:
        sums = _product(negative_offset(w, FORM, ASM), x, part if OFFSET else tl.zeros_like(acc), NUM_CHUNKS)
    part = _product(w, x, sums if OFFSET else part, NUM_CHUNKS)
    if GROUP:
        part = tl.fma(part, tl.broadcast_to(scale, part.shape), acc)
    if MINIMUMS:
        part = tl.fma(sums, tl.broadcast_to(minimum / 128, sums.shape), part)
    return part


@jit
def _product(w, x, acc, NUM_CHUNKS: tl.constexpr):
    return tl.dot(w, x.T if NUM_CHUNKS == 1 else tl.trans(x, 0, 2, 1), acc)


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
    pdl, one_row = use_pdl(x), num_rows == 1 and not fixed_order  # else as one of several
    if config is None:
        vector = one_row and weight.form in GEMV_ENCODINGS
        config = gemv_config(weight) if vector else wna16_skinny_config(weight, 1 if one_row else max(num_rows, 2))
    if residual is not None:
        out = residual
    elif out is None:
        width = size_out if activation is None else size_out // 2
        out = torch.empty((num_rows, width), dtype=out_dtype or x.dtype, device=x.device)
    bias_of = x if bias is None else bias  # kernels need pointers, but do not read them without their option
    minimums = weight.scales if weight.minimums is None else weight.minimums
    constants = kernel_options(weight)
    options = {
        "K": size_in, "BIAS": bias is not None, "RESIDUAL": residual is not None, "ACTIVATION": activation,
        "BLOCK_N": config.block_n, "PDL": pdl, "num_warps": config.num_warps, "launch_pdl": pdl,
    }  # fmt: skip
    num_blocks = -(-size_out // config.block_n)
    if isinstance(config, GemvConfig):
        del constants["TABLE"], constants["ASM"]
        wna16_gemv_kernel[(-(-num_blocks // config.blocks),)](
            x, weight.codes, weight.scales, minimums, bias_of, x if norm_weight is None else norm_weight, out, out,
            size_out, eps, NORM=norm_weight is not None, BLOCKS=config.blocks, WORDS=row_words(weight),
            **constants, **options,
        )  # fmt: skip
        return out
    if norm_weight is not None and not one_row:
        x, norm_weight = rms_norm_triton(x, norm_weight, eps), None
    num_chunks, chunk = wna16_sum_order(size_out, size_in)
    block_k = step_columns(weight, config.block_k)
    _wna16_skinny_gemm_kernel[(num_blocks,)](
        x, weight.codes, weight.scales, minimums, bias_of, x if norm_weight is None else norm_weight, out, out,
        x.stride(0), num_rows, size_out, eps, NORM=norm_weight is not None, NUM_CHUNKS=num_chunks, CHUNK=chunk,
        BLOCK_K=block_k, NUM_TOKENS=8 if num_rows <= 8 else 16,
        ROW=next_power_of_2(size_in), STAGES=config.stages,
        AHEAD=min(config.ahead, chunk // block_k), UNROLL=config.unroll,
        **constants, **options,
    )  # fmt: skip
    return out
