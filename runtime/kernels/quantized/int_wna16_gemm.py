"""Products of int16 activations with int8 or int4 weights, on the int8 matrix units.

An int16 row is two int8 limbs, each a row for the matrix units, so a product costs as many of their cycles as one in
bfloat16. Sums over the columns that share a scale are exact; scales multiply the sums. 8-bit values go to the matrix
units as they are. Three instructions turn eight 4-bit values into eight bytes, which are the values times 16.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.kernels.linear import tiles
from runtime.kernels.linear.tiles import (
    Tiling,
    blocks_of,
    keep_part,
    part_of,
    store_tile,
    sum_parts,
    tile_place,
)
from runtime.kernels.quantized.activations import Int16Activations
from runtime.kernels.quantized.quantized_weight import QuantizedWeight, dequantize_torch
from runtime.kernels.quantized.upcast import side_by_side
from runtime.kernels.triton_language import INTERPRETED, constexpr, jit, tl, use_pdl

_PLAIN = constexpr(INTERPRETED)
FEWEST_INT16_ROWS = 9  # fewer rows use the kernels for few rows, which include the norm
# Four bytes with two values n each -> 16 * (n - 8) for the low nibbles, and for the high nibbles.
_UNPACK = constexpr("""{
.reg .b32 a;
shl.b32 a, $2, 4;
lop3.b32 $0, a, 0xF0F0F0F0, 0x80808080, 0x6A;
lop3.b32 $1, $2, 0xF0F0F0F0, 0x80808080, 0x6A;
}""")
_TWO_OUTPUTS = constexpr("=r,=r,r")


def int_wna16_gemm_torch(
    x: Int16Activations,
    weight: QuantizedWeight,  # int8, int4 or uint4
    bias: torch.Tensor | None = None,  # [N]
    residual: torch.Tensor | None = None,  # [num_rows, N] contiguous: added to in place and returned
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """x @ weight.T + bias -> [num_rows, N]."""
    bias = None if bias is None else bias.float()
    y = F.linear(x.dequantize(torch.float32), dequantize_torch(weight), bias).to(dtype)
    return y if residual is None else residual.add_(y)


@jit
def _unpack(packed):
    """Bytes with two values -> 16 * (value - 8) for the low and the high nibbles, int8."""
    if _PLAIN:
        low, high = ((packed << 4) ^ 128).to(tl.int8, bitcast=True), ((packed & 240) ^ 128).to(tl.int8, bitcast=True)
    else:
        low, high = tl.inline_asm_elementwise(
            _UNPACK, _TWO_OUTPUTS, [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    return low, high


@jit
def _add_group(
    total, acc, scales, zero_points, sums_ptr, tokens, num_rows, group,
    HAS_ZERO_POINTS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """total plus a group's sums times its scales, minus its zero points times x's sums."""
    high, low = tl.split(tl.reshape(acc, (acc.shape[0], BLOCK_M, 2)))  # a row's limbs are neighbours
    scale = tl.load(scales)[:, None]
    total += (high * 256 + low).to(tl.float32) * scale
    if HAS_ZERO_POINTS:
        x_sums = tl.load(sums_ptr + group * num_rows + tokens, mask=tokens < num_rows, other=0.0)
        total -= 16.0 * (tl.load(zero_points)[:, None] - 8.0 * scale) * x_sums[None, :]  # values are 16 * (n - 8)
    return total


class IntGemmForm(NamedTuple):
    """Constants of `_int_wna16_gemm_kernel`."""

    plane: int  # columns between a byte's two values; 0 for 8-bit values
    group_size: int  # 0, or the columns per step, or per plane
    has_zero_points: bool
    bias: bool
    residual: bool  # adds to out
    split: int
    block_m: int
    block_n: int
    block_k: int
    stages: int
    pdl: bool


@jit(do_not_specialize=["num_rows"])
def _int_wna16_gemm_kernel(
    xs,  # descriptor: x's limbs [2 * num_rows, K] with blocks [2 * BLOCK_M, columns of a product]
    weights,  # descriptor: the weight's values [N, K or K / 2] with blocks [BLOCK_N, BLOCK_K or PLANE]
    x_scales_ptr,  # [num_rows]
    x_sums_ptr,  # [groups, num_rows], read with zero points
    scales_ptr,  # [at least N], or with groups [groups, SCALE_STRIDE]
    zero_points_ptr,  # shaped like scales
    bias_ptr,  # [N], read if BIAS
    outs,  # descriptor: [num_rows, N] with blocks [BLOCK_M, BLOCK_N]
    sums_ptr,  # [tiles, SPLIT, BLOCK_M * BLOCK_N] fp32, used with SPLIT > 1
    counters_ptr,  # [tiles] int32 zeros, used with SPLIT > 1
    num_rows,
    N,
    K,
    SCALE_STRIDE,
    FORM: tl.constexpr,  # `IntGemmForm`
):
    """Program (i, j): tile i, part j of K."""
    token, row = tile_place(tl.program_id(0), num_rows, N, FORM.block_m, FORM.block_n)
    tokens = token + tl.arange(0, FORM.block_m)
    row_of = tl.minimum(row + tl.arange(0, FORM.block_n), N - 1)
    scales, zero_points = scales_ptr + row_of, zero_points_ptr + row_of
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    first, last = part_of(K, FORM.split, FORM.block_k)
    if FORM.group_size:
        total = tl.full((FORM.block_n, FORM.block_m), 0, tl.float32)
        for start in tl.range(first, last, FORM.block_k, num_stages=FORM.stages):
            group = start // FORM.group_size
            at = group * SCALE_STRIDE
            if FORM.plane == 0:
                acc = tl.dot(weights.load([row, start]), xs.load([2 * token, start]).T, out_dtype=tl.int32)
            else:
                low, high = _unpack(weights.load([row, start // 2]))
                if FORM.group_size == FORM.plane:
                    acc = tl.dot(low, xs.load([2 * token, start]).T, out_dtype=tl.int32)
                    total = _add_group(
                        total, acc, scales + at, zero_points + at, x_sums_ptr, tokens, num_rows, group,
                        FORM.has_zero_points, FORM.block_m,
                    )  # fmt: skip
                    acc = tl.dot(high, xs.load([2 * token, start + FORM.plane]).T, out_dtype=tl.int32)
                    group += 1
                    at += SCALE_STRIDE
                else:
                    acc = tl.dot(side_by_side(low, high), xs.load([2 * token, start]).T, out_dtype=tl.int32)
            total = _add_group(
                total, acc, scales + at, zero_points + at, x_sums_ptr, tokens, num_rows, group, FORM.has_zero_points,
                FORM.block_m,
            )  # fmt: skip
    else:
        acc = tl.full((FORM.block_n, 2 * FORM.block_m), 0, tl.int32)
        for start in tl.range(first, last, FORM.block_k, num_stages=FORM.stages):
            acc = tl.dot(weights.load([row, start]), xs.load([2 * token, start]).T, acc, out_dtype=tl.int32)
        high, low = tl.split(tl.reshape(acc, (FORM.block_n, FORM.block_m, 2)))
        total = high.to(tl.float32) * 256.0 + low.to(tl.float32)

    if FORM.split > 1:
        if keep_part(sums_ptr, counters_ptr, total, FORM.split) != FORM.split - 1:
            return
        total = sum_parts(sums_ptr, counters_ptr, total, FORM.split)
    total *= tl.load(x_scales_ptr + tokens, mask=tokens < num_rows, other=0.0)[None, :]
    if FORM.plane:
        total *= 0.0625
    if not FORM.group_size:
        total *= tl.load(scales)[:, None]
    if FORM.bias:
        total += tl.load(bias_ptr + row_of).to(tl.float32)[:, None]
    store_tile(outs, total.to(outs.dtype).T, token, row, FORM.residual)


def int_wna16_gemm_triton(
    x: Int16Activations,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`int_wna16_gemm_torch` as one kernel, for a weight that `has_int_wna16_gemm`."""
    num_rows, (size_out, size_in) = len(x.scales), weight.shape
    device = weight.values.device
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((num_rows, size_out), dtype=dtype, device=device)
    if not num_rows:
        return out
    tiling, pdl = tiling or int_wna16_tiling(weight, num_rows), use_pdl(x.limbs)
    block_k = 2 * weight.plane or weight.group_size or tiling.block_k
    width = weight.plane if weight.plane and weight.plane == weight.group_size else block_k
    split, sums, counters = tiling.parts(num_rows, size_out, out)
    xs = blocks_of(x.limbs, 2 * tiling.block_m, width)
    weights = blocks_of(weight.values, tiling.block_n, weight.plane or block_k)
    outs = blocks_of(out, tiling.block_m, tiling.block_n)
    _int_wna16_gemm_kernel[(tiling.num_tiles(num_rows, size_out), split)](
        xs, weights, x.scales, x.scales if x.sums is None else x.sums, weight.scales, weight.zero_points_or_scales,
        out if bias is None else bias, outs, sums, counters, num_rows, size_out, size_in, weight.scales.shape[1],
        FORM=IntGemmForm(
            plane=weight.plane, group_size=weight.group_size, has_zero_points=weight.zero_points is not None,
            bias=bias is not None, residual=residual is not None, split=split, block_m=tiling.block_m,
            block_n=tiling.block_n, block_k=block_k, stages=tiling.stages, pdl=pdl,
        ),
        num_warps=tiling.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def int_wna16_tiling(weight: QuantizedWeight, num_rows: int) -> Tiling:
    """The best tiles measured on an H200. With few rows, K is split where too few programs would read the weight."""
    size_out, size_in = weight.shape
    block_m = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
    is_wide = size_out >= 16384
    if weight.plane:
        if is_wide:
            return Tiling(block_m, 128, 128, 4, 4)
        num_tiles = -(-num_rows // block_m) * -(-size_out // 64)
        return Tiling(block_m, 64, 128, 4, 4, 4 if num_rows <= 32 or num_tiles <= 64 else 2 if num_tiles <= 128 else 1)
    if num_rows <= 64:
        split = 1 if is_wide else 4 if num_rows <= 16 or size_in >= 8192 else 2 if size_out <= 4096 else 1
        return Tiling(block_m, 64, 128, 4, 4 if is_wide or split == 4 else 6, split)
    block_m = 128 if is_wide or num_rows > 128 else 64
    return Tiling(block_m, 128, 128, 8, 4, 2 if size_in >= 8192 else 1)


def has_int_wna16_gemm(weight: QuantizedWeight) -> bool:
    """True if this kernel takes the weight on its device: smaller groups would spend more on sums than on products."""
    size_out, size_in = weight.shape
    is_shared = weight.scale_rows == 1 and (
        weight.group_size in (64, 128) if weight.plane else weight.group_size in (0, 128)
    )
    is_aligned = size_in % (32 if weight.plane else 16) == 0 and size_out % 8 == 0  # the copy engine reads 16-byte rows
    is_integer = weight.encoding in ("int4", "uint4") or (weight.encoding == "int8" and weight.zero_points is None)
    return is_integer and is_shared and is_aligned and tiles.multiplies_fp8(weight.values.device)


def most_int16_rows(weight: QuantizedWeight) -> int:
    """Above this number of rows, other products cost less time."""
    if not weight.plane:
        return 256
    return 128 if weight.group_size > weight.plane else 64
