"""Products of several rows with weights that are codes of 4 bits, in tiles: the copy engine brings codes and rows,
codes are decoded in registers to bfloat16 and scaled there, and go on from the registers to the matrix units.

The weight's rows are those of the matrix instruction. A scale is rounded to bfloat16, and so is a scaled number, as in
a dense copy of the weight.
"""

from __future__ import annotations

import torch

from runtime.kernels.linear import tiles
from runtime.kernels.linear.tiles import Tiling, blocks_of, keep_part, part_of, store_tile, sum_parts, tile_place
from runtime.kernels.quantized.quantized_weight import QuantizedWeight, kernel_options, upcast_nibbles
from runtime.kernels.triton_language import constexpr, jit, tl, use_pdl

FEWEST_W4A16_ROWS = 9  # fewer go to the kernels of few rows, whose norms are folded in
MAX_W4A16_ROWS = 256  # above, a dense copy of the weight costs less time
_SCALE = constexpr("mul.rn.bf16x2 $0, $1, $2;")
_SCALE_AND_ADD = constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")
# What `upcast_nibbles` adds to nibbles is exactly taken off before.
_SHIFT_AND_SCALE = constexpr(
    "{\n.reg .b32 a;\nmov.b32 a, 0xC308C308;\nadd.rn.bf16x2 a, a, $1;\nmul.rn.bf16x2 $0, a, $2;\n}"
)
_SHIFT_SCALE_AND_ADD = constexpr(
    "{\n.reg .b32 a;\nmov.b32 a, 0xC300C300;\nadd.rn.bf16x2 a, a, $1;\nfma.rn.bf16x2 $0, a, $2, $3;\n}"
)
_OF_2 = constexpr("=r,r,r")
_OF_3 = constexpr("=r,r,r,r")


@jit
def _scaled(
    numbers, scales, minimums, at,
    FORM: tl.constexpr, MINIMUMS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Decoded numbers of a group of columns [BLOCK_N, columns] times their scales, minus their minimums."""
    scale = tl.broadcast_to(tl.load(scales + at).to(numbers.dtype)[:, None], numbers.shape)
    if ASM is None:
        OFFSET: tl.constexpr = 136 if FORM == "int4" else 128 if FORM == "uint4" else 0
        numbers = (numbers - OFFSET) * scale
        if MINIMUMS:
            numbers -= tl.load(minimums + at)[:, None].to(numbers.dtype)
    elif MINIMUMS:
        ADD: tl.constexpr = _SHIFT_SCALE_AND_ADD if FORM == "uint4" else _SCALE_AND_ADD
        minimum = tl.broadcast_to((-tl.load(minimums + at)).to(numbers.dtype)[:, None], numbers.shape)
        numbers = tl.inline_asm_elementwise(
            ADD, _OF_3, [numbers, scale, minimum], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        MULTIPLY: tl.constexpr = _SHIFT_AND_SCALE if FORM == "int4" else _SCALE
        numbers = tl.inline_asm_elementwise(MULTIPLY, _OF_2, [numbers, scale], dtype=tl.bfloat16, is_pure=True, pack=2)
    return numbers


@jit(do_not_specialize=["num_rows"])
def _w4a16_gemm_kernel(
    xs,  # descriptor of x [num_rows, K] with blocks [BLOCK_M, PLANE]
    weights,  # descriptor of the weight's codes [N, K / 2] with blocks [BLOCK_N, PLANE]
    scales_ptr,  # [K / GROUP, SCALE_STRIDE]
    minimums_ptr,  # like scales, read if MINIMUMS
    bias_ptr,  # [N], read if BIAS
    outs,  # descriptor of [num_rows, N] with blocks [BLOCK_M, BLOCK_N]
    sums_ptr,  # [tiles, SPLIT, BLOCK_M * BLOCK_N] fp32, used if SPLIT > 1
    counters_ptr,  # [tiles] int32 zeros, used if SPLIT > 1
    num_rows,
    N,
    K,
    FORM: tl.constexpr,
    TABLE: tl.constexpr,
    ASM: tl.constexpr,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    MINIMUMS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,  # out is added to
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, j): tile i, part j of K."""
    token, row = tile_place(tl.program_id(0), num_rows, N, BLOCK_M, BLOCK_N)
    row_of = tl.minimum(row + tl.arange(0, BLOCK_N), N - 1)
    scales, minimums = scales_ptr + row_of // SCALE_ROWS, minimums_ptr + row_of // SCALE_ROWS
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    first, last = part_of(K, SPLIT, 2 * PLANE)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(first, last, 2 * PLANE, num_stages=STAGES):
        low, high = upcast_nibbles(weights.load([row, start // 2]), FORM, TABLE, ASM, xs.dtype)
        low = _scaled(low, scales, minimums, start // GROUP * SCALE_STRIDE, FORM, MINIMUMS, ASM)
        acc = tl.dot(low, xs.load([token, start]).T, acc, input_precision="ieee")
        at = (start + PLANE) // GROUP * SCALE_STRIDE
        high = _scaled(high, scales, minimums, at, FORM, MINIMUMS, ASM)
        acc = tl.dot(high, xs.load([token, start + PLANE]).T, acc, input_precision="ieee")
    if SPLIT > 1:
        if keep_part(sums_ptr, counters_ptr, acc, SPLIT) != SPLIT - 1:
            return
        acc = sum_parts(sums_ptr, counters_ptr, acc, SPLIT)
    if BIAS:
        acc += tl.load(bias_ptr + row_of).to(tl.float32)[:, None]
    store_tile(outs, acc.to(outs.dtype).T, token, row, RESIDUAL)


def w4a16_gemm_triton(
    x: torch.Tensor,  # [num_rows, K]
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`wna16_gemm_torch` of a weight that `has_w4a16_gemm`, with fp32 sums."""
    num_rows, (size_out, size_in) = len(x), weight.shape
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((num_rows, size_out), dtype=out_dtype or x.dtype, device=x.device)
    if not num_rows:
        return out
    tiling, pdl = tiling or w4a16_tiling(weight, num_rows), use_pdl(x)
    split, sums, counters = tiling.parts(num_rows, size_out, out)
    xs, weights = blocks_of(x, tiling.block_m, weight.plane), blocks_of(weight.codes, tiling.block_n, weight.plane)
    outs = blocks_of(out, tiling.block_m, tiling.block_n)
    _w4a16_gemm_kernel[(tiling.num_tiles(num_rows, size_out), split)](
        xs, weights, weight.scales, weight.scales if weight.minimums is None else weight.minimums,
        out if bias is None else bias, outs, sums, counters, num_rows, size_out, size_in, BIAS=bias is not None,
        RESIDUAL=residual is not None, SPLIT=split, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n,
        STAGES=tiling.stages, PDL=pdl, num_warps=tiling.num_warps, launch_pdl=pdl, **kernel_options(weight),
    )  # fmt: skip
    return out


def w4a16_tiling(weight: QuantizedWeight, num_rows: int) -> Tiling:
    """The best tiles measured on an H200: a weight is decoded once for up to 256 rows where it has rows enough."""
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
    """True if the weight can be multiplied with in tiles on its device."""
    size_out, size_in = weight.shape
    is_aligned = size_in % (2 * weight.plane or 1) == 0 and size_out % 8 == 0  # the copy engine's rows: 16 bytes
    return weight.plane > 0 and weight.group >= 32 and is_aligned and tiles.multiplies_fp8(weight.codes.device)
