"""Tiled products for several rows with 4-bit weights and 16-bit activations, for Hopper and later.

The copy engine (TMA) loads value tiles and row tiles. Values are upcast and scaled to bfloat16 in registers, and move
from there to the matrix units. Weight rows are the matrix instruction's rows. A scale is rounded to bfloat16, and
so is a scaled value, as in a dense copy of the weight. The torch twin is `wna16_gemm_torch`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.linear import tiles
from runtime.kernels.linear.tiles import (
    Tiling,
    blocks_of,
    keep_part,
    output_of,
    part_of,
    store_tile,
    sum_parts,
    tile_place,
)
from runtime.kernels.quantized.quantized_weight import QuantizedWeight
from runtime.kernels.quantized.upcast import upcast_nibbles
from runtime.kernels.triton_language import constexpr, jit, tl, use_pdl

FEWEST_W4A16_ROWS = 9  # fewer rows use the kernels for few rows, which include the norm
MAX_W4A16_ROWS = 256  # a dense copy of the weight costs less time
_SCALE = constexpr("mul.rn.bf16x2 $0, $1, $2;")
_SCALE_AND_ADD = constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")
# These first subtract exactly what `upcast_nibbles` adds to integers.
_SHIFT_AND_SCALE = constexpr(
    "{\n.reg .b32 a;\nmov.b32 a, 0xC308C308;\nadd.rn.bf16x2 a, a, $1;\nmul.rn.bf16x2 $0, a, $2;\n}"
)
_SHIFT_SCALE_AND_ADD = constexpr(
    "{\n.reg .b32 a;\nmov.b32 a, 0xC300C300;\nadd.rn.bf16x2 a, a, $1;\nfma.rn.bf16x2 $0, a, $2, $3;\n}"
)
_TWO_INPUTS = constexpr("=r,r,r")
_THREE_INPUTS = constexpr("=r,r,r,r")


@jit
def _scaled(numbers, scales, zero_points, at, LAYOUT: tl.constexpr):
    """One column group's upcast values [BLOCK_N, columns] times their scales, minus their zero points."""
    scale = tl.broadcast_to(tl.load(scales + at).to(numbers.dtype)[:, None], numbers.shape)
    if LAYOUT.asm is None:
        OFFSET: tl.constexpr = 136 if LAYOUT.encoding == "int4" else 128 if LAYOUT.encoding == "uint4" else 0
        numbers = (numbers - OFFSET) * scale
        if LAYOUT.has_zero_points:
            numbers -= tl.load(zero_points + at)[:, None].to(numbers.dtype)
    elif LAYOUT.has_zero_points:
        ADD: tl.constexpr = _SHIFT_SCALE_AND_ADD if LAYOUT.encoding == "uint4" else _SCALE_AND_ADD
        zero_point = tl.broadcast_to((-tl.load(zero_points + at)).to(numbers.dtype)[:, None], numbers.shape)
        numbers = tl.inline_asm_elementwise(
            ADD, _THREE_INPUTS, [numbers, scale, zero_point], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        MULTIPLY: tl.constexpr = _SHIFT_AND_SCALE if LAYOUT.encoding == "int4" else _SCALE
        numbers = tl.inline_asm_elementwise(
            MULTIPLY, _TWO_INPUTS, [numbers, scale], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return numbers


class GemmForm(NamedTuple):
    """Constants of `_w4a16_gemm_kernel`."""

    bias: bool
    residual: bool  # adds to out
    split: int
    block_m: int
    block_n: int
    stages: int
    pdl: bool


@jit(do_not_specialize=["num_rows"])
def _w4a16_gemm_kernel(
    xs,  # descriptor: x [num_rows, K] with blocks [BLOCK_M, LAYOUT.plane]
    weights,  # descriptor: the weight's values [N, K / 2] with blocks [BLOCK_N, LAYOUT.plane]
    scales_ptr,  # [groups, scale_stride]
    zero_points_ptr,  # shaped like scales
    bias_ptr,  # [N], read if BIAS
    outs,  # descriptor: [num_rows, N] with blocks [BLOCK_M, BLOCK_N]
    sums_ptr,  # [tiles, SPLIT, BLOCK_M * BLOCK_N] fp32, used if SPLIT > 1
    counters_ptr,  # [tiles] int32 zeros, used if SPLIT > 1
    num_rows,
    N,
    K,
    LAYOUT: tl.constexpr,
    FORM: tl.constexpr,  # `GemmForm`
):
    """Program (i, j): tile i, part j of K."""
    token, row = tile_place(tl.program_id(0), num_rows, N, FORM.block_m, FORM.block_n)
    row_of = tl.minimum(row + tl.arange(0, FORM.block_n), N - 1)
    scales, zero_points = scales_ptr + row_of // LAYOUT.scale_rows, zero_points_ptr + row_of // LAYOUT.scale_rows
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    STEP: tl.constexpr = 2 * LAYOUT.plane
    first, last = part_of(K, FORM.split, STEP)
    acc = tl.full((FORM.block_n, FORM.block_m), 0, tl.float32)
    for start in tl.range(first, last, STEP, num_stages=FORM.stages):
        low, high = upcast_nibbles(weights.load([row, start // 2]), LAYOUT, xs.dtype)
        low = _scaled(low, scales, zero_points, start // LAYOUT.group_size * LAYOUT.scale_stride, LAYOUT)
        acc = tl.dot(low, xs.load([token, start]).T, acc, input_precision="ieee")
        at = (start + LAYOUT.plane) // LAYOUT.group_size * LAYOUT.scale_stride
        high = _scaled(high, scales, zero_points, at, LAYOUT)
        acc = tl.dot(high, xs.load([token, start + LAYOUT.plane]).T, acc, input_precision="ieee")
    if FORM.split > 1:
        if keep_part(sums_ptr, counters_ptr, acc, FORM.split) != FORM.split - 1:
            return
        acc = sum_parts(sums_ptr, counters_ptr, acc, FORM.split)
    if FORM.bias:
        acc += tl.load(bias_ptr + row_of).to(tl.float32)[:, None]
    store_tile(outs, acc.to(outs.dtype).T, token, row, FORM.residual)


def w4a16_gemm_triton(
    x: torch.Tensor,  # [num_rows, K]
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`wna16_gemm_torch` with fp32 sums, for a weight that `has_w4a16_gemm`."""
    num_rows, (size_out, size_in) = len(x), weight.shape
    out = output_of(x, size_out, out_dtype, out, residual)
    if not num_rows:
        return out
    tiling, pdl = tiling or w4a16_tiling(weight, num_rows), use_pdl(x)
    split, sums, counters = tiling.parts(num_rows, size_out, out)
    xs, weights = blocks_of(x, tiling.block_m, weight.plane), blocks_of(weight.values, tiling.block_n, weight.plane)
    outs = blocks_of(out, tiling.block_m, tiling.block_n)
    _w4a16_gemm_kernel[(tiling.num_tiles(num_rows, size_out), split)](
        xs, weights, weight.scales, weight.zero_points_or_scales, out if bias is None else bias, outs, sums, counters,
        num_rows, size_out, size_in,
        FORM=GemmForm(
            bias=bias is not None, residual=residual is not None, split=split, block_m=tiling.block_m,
            block_n=tiling.block_n, stages=tiling.stages, pdl=pdl,
        ),
        num_warps=tiling.num_warps, launch_pdl=pdl, LAYOUT=weight.layout,
    )  # fmt: skip
    return out


def w4a16_tiling(weight: QuantizedWeight, num_rows: int) -> Tiling:
    """The best tiles measured on an H200: a weight with enough rows is upcast once for up to 256 rows of x."""
    size_out, size_in = weight.shape
    is_wide = size_out >= 16384
    if num_rows <= 64:
        block_m = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
        return Tiling(block_m, 128 if is_wide else 64, 128, 4, 3, 4)
    if is_wide:
        return Tiling(128, 128, 128, 8, 2) if num_rows <= 128 else Tiling(256, 128, 128, 8, 3)
    if size_in >= 8192 and num_rows <= 128:
        return Tiling(128, 128, 128, 8, 3, 4)
    return Tiling(128, 64, 128, 4, 3, 2 if -(-num_rows // 128) * size_out <= 8192 else 1)


def has_w4a16_gemm(weight: QuantizedWeight) -> bool:
    """True if this kernel takes the weight on its device."""
    size_out, size_in = weight.shape
    is_aligned = size_in % (2 * weight.plane or 1) == 0 and size_out % 8 == 0  # the copy engine reads 16-byte rows
    return weight.plane > 0 and weight.group_size >= 32 and is_aligned and tiles.multiplies_fp8(weight.values.device)
