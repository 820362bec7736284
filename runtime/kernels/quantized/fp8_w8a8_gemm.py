"""Products of fp8 activations with fp8 weights (w8a8): both go to the matrix units as they are.

Scales multiply the sums. The matrix units keep about 14 bits in a sum of e4m3 products. This kernel adds one column
step on them, and adds steps in float32. The library adds all columns on the matrix units. Its error is 0.13 % of a
sum over 4,096 columns and 0.29 % over 14,336, a tenth of the activations' rounding error. It is 1.3 times
as fast at thousands of rows.
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
from runtime.kernels.quantized.activations import Fp8Activations
from runtime.kernels.quantized.quantized_weight import QuantizedWeight, dequantize_torch
from runtime.kernels.triton_language import INTERPRETED, jit, tl, use_pdl

_LIBRARY_TILES = 80  # 128 x 128 tiles from which the library, which does not split K, is faster


def fp8_w8a8_gemm_torch(
    x: Fp8Activations,
    weight: QuantizedWeight,  # fp8 with a scale for each row, or for each 128 x 128 block
    bias: torch.Tensor | None = None,  # [N]
    residual: torch.Tensor | None = None,  # [num_rows, N] contiguous: added to in place and returned
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """x @ weight.T + bias -> [num_rows, N]."""
    bias = None if bias is None else bias.float()
    y = F.linear(x.dequantize(torch.float32), dequantize_torch(weight), bias).to(dtype)
    return y if residual is None else residual.add_(y)


class Fp8GemmForm(NamedTuple):
    """Constants of `_fp8_w8a8_gemm_kernel`."""

    block_scales: bool  # block_n and block_k are at most 128 then
    bias: bool
    residual: bool  # adds to out
    split: int
    block_m: int
    block_n: int
    block_k: int
    stages: int
    swap: bool
    pdl: bool


@jit(do_not_specialize=["num_rows"])
def _fp8_w8a8_gemm_kernel(
    xs,  # descriptor: x's values [num_rows, K] with blocks [BLOCK_M, BLOCK_K]
    weights,  # descriptor: the weight's [N, K] with blocks [BLOCK_N, BLOCK_K]
    x_scales_ptr,  # [num_rows]
    scales_ptr,  # [at least N], or [K / 128, SCALE_STRIDE] if SCALE_STRIDE
    bias_ptr,  # [N], read if BIAS
    outs,  # descriptor: [num_rows, N] with blocks [BLOCK_M, BLOCK_N]
    sums_ptr,  # [tiles, SPLIT, BLOCK_M * BLOCK_N] fp32, used with SPLIT > 1
    counters_ptr,  # [tiles] int32 zeros, used with SPLIT > 1
    num_rows,
    N,
    K,
    SCALE_STRIDE,
    FORM: tl.constexpr,  # `Fp8GemmForm`
):
    """Program (i, j): tile i, part j of K."""
    token, row = tile_place(tl.program_id(0), num_rows, N, FORM.block_m, FORM.block_n)
    tokens = token + tl.arange(0, FORM.block_m)
    rows = row + tl.arange(0, FORM.block_n)
    row_of = tl.minimum(rows, N - 1)
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    first, last = part_of(K, FORM.split, FORM.block_k)
    acc = tl.full((FORM.block_n, FORM.block_m) if FORM.swap else (FORM.block_m, FORM.block_n), 0, tl.float32)
    for start in tl.range(first, last, FORM.block_k, num_stages=FORM.stages):
        x, w = xs.load([token, start]), weights.load([row, start])
        if FORM.block_scales:
            step = tl.dot(w, x.T) if FORM.swap else tl.dot(x, w.T)
            acc += step * tl.load(scales_ptr + start // 128 * SCALE_STRIDE + row // 128)
        else:
            acc += tl.dot(w, x.T) if FORM.swap else tl.dot(x, w.T)

    if FORM.split > 1:
        if keep_part(sums_ptr, counters_ptr, acc, FORM.split) != FORM.split - 1:
            return
        acc = sum_parts(sums_ptr, counters_ptr, acc, FORM.split)
    x_scales = tl.load(x_scales_ptr + tokens, mask=tokens < num_rows, other=0.0)
    acc *= x_scales[None, :] if FORM.swap else x_scales[:, None]
    if not FORM.block_scales:
        scales = tl.load(scales_ptr + row_of)
        acc *= scales[:, None] if FORM.swap else scales[None, :]
    if FORM.bias:
        bias = tl.load(bias_ptr + row_of).to(tl.float32)
        acc += bias[:, None] if FORM.swap else bias[None, :]
    y = acc.to(outs.dtype)
    store_tile(outs, y.T if FORM.swap else y, token, row, FORM.residual)


def fp8_w8a8_gemm_triton(
    x: Fp8Activations,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`fp8_w8a8_gemm_torch` as one kernel, for a weight that `has_fp8_gemm`."""
    num_rows, (size_out, size_in) = len(x.values), weight.shape
    device = weight.values.device
    out = torch.empty((num_rows, size_out), dtype=dtype, device=device) if residual is None else residual
    if not num_rows:
        return out
    tiling, pdl = tiling or fp8_tiling(weight, num_rows), use_pdl(x.values)
    block_k = weight.group_size or tiling.block_k  # a step's columns share a scale
    stages = tiling.stages * tiling.block_k // block_k
    split, sums, counters = tiling.parts(num_rows, size_out, out)
    xs, weights = blocks_of(x.values, tiling.block_m, block_k), blocks_of(weight.values, tiling.block_n, block_k)
    outs = blocks_of(out, tiling.block_m, tiling.block_n)
    _fp8_w8a8_gemm_kernel[(tiling.num_tiles(num_rows, size_out), split)](
        xs, weights, x.scales, weight.scales, out if bias is None else bias, outs, sums, counters, num_rows, size_out,
        size_in, weight.scales.shape[1],
        FORM=Fp8GemmForm(
            block_scales=weight.group_size > 0, bias=bias is not None, residual=residual is not None, split=split,
            block_m=tiling.block_m, block_n=tiling.block_n, block_k=block_k, stages=stages, swap=tiling.swap, pdl=pdl,
        ),
        num_warps=tiling.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def fp8_tiling(weight: QuantizedWeight, num_rows: int) -> Tiling:
    """The best tiles measured on an H200. With few rows, K is split where too few programs would read the weight."""
    size_out, size_in = weight.shape
    tiles_n = -(-size_out // 64)
    split = 4 if tiles_n <= 32 else 2 if tiles_n <= 64 else 1
    if num_rows <= 64 and (num_rows <= 32 or tiles_n < 256):
        block_m = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
        return Tiling(block_m, 64, 256, 4, 4, split, swap=True)
    if num_rows <= 64:
        return Tiling(64, 128, 128, 8, 4, swap=True)
    if num_rows <= 256:
        long = size_in >= 8192
        return Tiling(128, 64, 128, 4, 6, 2, swap=True) if long else Tiling(128, 64, 256, 4, 3, swap=True)
    return Tiling(128, 128, 128, 8, 4)


def has_fp8_gemm(weight: QuantizedWeight) -> bool:
    """True if this kernel takes the weight on its device."""
    return fits_fp8_gemm(weight.encoding, weight.shape, weight.group_size, weight.scale_rows, weight.values.device)


def fits_fp8_gemm(
    encoding: str, shape: tuple[int, ...], group_size: int, scale_rows: int, device: torch.device
) -> bool:
    """`has_fp8_gemm` for these fields of a `QuantizedWeight`."""
    size_out, size_in = shape
    is_shared = (group_size, scale_rows) in ((0, 1), (128, 128))
    is_aligned = size_in % 16 == 0 and size_out % 8 == 0  # the copy engine reads 16-byte rows
    return encoding == "fp8" and is_shared and is_aligned and tiles.multiplies_fp8(device)


def multiply_fp8(
    x: Fp8Activations,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`fp8_w8a8_gemm_triton`, or the library's product where that is faster."""
    num_rows, size_out = len(x.values), weight.shape[0]
    many = num_rows > 64 and -(-num_rows // 128) * -(-size_out // 128) >= _LIBRARY_TILES
    if not many or weight.group_size or size_out % 16 or dtype != torch.bfloat16 or INTERPRETED:
        return fp8_w8a8_gemm_triton(x, weight, bias, residual, dtype)
    scales = x.scales[:, None], weight.scales[:, :size_out]
    y = torch._scaled_mm(x.values, weight.values.t(), *scales, out_dtype=dtype, use_fast_accum=True)
    if bias is not None:
        y.add_(bias)
    return y if residual is None else residual.add_(y)
