"""Products of rows that are fp8 codes with weights that are: both go to the matrix units as they are, and scales come
after the sums.

The matrix units keep about 14 bits of a sum of e4m3 products. Here they add a step of columns, and steps are added in
float32. The library adds all: its error, 0.13 % of a sum over 4,096 columns and 0.29 % over 14,336, is a tenth of what
rounding rows to codes does, and it is 1.3 times as fast at thousands of rows.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.kernels._triton import INTERPRETED, TensorDescriptor, constexpr, jit, tl, use_pdl
from runtime.kernels.batch_invariant_linear import MAX_SPLIT_TILES, _counters
from runtime.kernels.fp8_rows import Fp8Rows, fp8_rows_triton, normed_fp8_rows
from runtime.kernels.gated_activation import Activation
from runtime.kernels.linear import Linear, Norm
from runtime.kernels.quantized_linear import QuantizedLinear
from runtime.kernels.quantized_weight import QuantizedWeight, dequantize
from runtime.kernels.rms_norm import rms_norm_triton

_ADDS = constexpr(not INTERPRETED)  # the copy engine does, in the residual's type
_LIBRARY_TILES = 80  # of 128 x 128; the library's product, which has no parts of K, is faster with as many
_GROUP = 8  # tiles of x that neighbouring programs share a tile of the weight with


class Fp8Tiling(NamedTuple):
    """How tiles are laid over a product."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    stages: int
    split: int = 1  # parts of K that programs sum side by side
    swap: bool = False  # rows of the weight are those of the matrix instruction


def fp8_linear_torch(
    x: Fp8Rows,
    weight: QuantizedWeight,  # fp8, with scales of rows or of blocks of 128 x 128
    bias: torch.Tensor | None = None,  # [N]
    residual: torch.Tensor | None = None,  # [num_rows, N] contiguous: added to in place and returned
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """x @ weight.T + bias -> [num_rows, N]."""
    bias = None if bias is None else bias.float()
    y = F.linear(x.dequantize(torch.float32), dequantize(weight), bias).to(dtype)
    return y if residual is None else residual.add_(y)


@jit(do_not_specialize=["num_rows"])
def _fp8_product_kernel(
    xs,  # descriptor of x's codes [num_rows, K] with blocks [BLOCK_M, BLOCK_K]
    weights,  # descriptor of the weight's [N, K] with blocks [BLOCK_N, BLOCK_K]
    x_scales_ptr,  # [num_rows]
    scales_ptr,  # [at least N], or [K / 128, SCALE_STRIDE] if SCALE_STRIDE
    bias_ptr,  # [N], read if BIAS
    outs,  # descriptor of [num_rows, N] with blocks [BLOCK_M, BLOCK_N]
    sums_ptr,  # [tiles, SPLIT, BLOCK_M * BLOCK_N] fp32, used if SPLIT > 1
    counters_ptr,  # [tiles] int32 zeros, used if SPLIT > 1
    num_rows,
    N,
    K,
    SCALE_STRIDE,
    BLOCK_SCALES: tl.constexpr,  # BLOCK_N and BLOCK_K are at most 128 then
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,  # out is added to
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, j): tile i, part j of K."""
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group_start = tile // (GROUP * tiles_n) * GROUP
    group_size = tl.minimum(tiles_m - group_start, GROUP)
    within = tile % (GROUP * tiles_n)
    token = (group_start + within % group_size) * BLOCK_M
    row = within // group_size * BLOCK_N
    tokens = token + tl.arange(0, BLOCK_M)
    rows = row + tl.arange(0, BLOCK_N)
    row_of = tl.minimum(rows, N - 1)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    part = tl.cdiv(tl.cdiv(K, SPLIT), BLOCK_K) * BLOCK_K
    first = tl.program_id(1) * part
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(first, tl.minimum(first + part, K), BLOCK_K, num_stages=STAGES):
        x, w = xs.load([token, start]), weights.load([row, start])
        if BLOCK_SCALES:
            step = tl.dot(w, x.T) if SWAP else tl.dot(x, w.T)
            acc += step * tl.load(scales_ptr + start // 128 * SCALE_STRIDE + row // 128)
        else:
            acc += tl.dot(w, x.T) if SWAP else tl.dot(x, w.T)

    if SPLIT > 1:
        size: tl.constexpr = BLOCK_M * BLOCK_N
        outer, inner = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
        sums = sums_ptr + tile * (SPLIT * size) + outer[:, None] * acc.shape[1] + inner[None, :]
        tl.store(sums + tl.program_id(1) * size, acc)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu") != SPLIT - 1:
            return
        tl.store(counters_ptr + tile, 0)
        acc = tl.load(sums, cache_modifier=".cg")
        for other in tl.static_range(1, SPLIT):
            acc += tl.load(sums + other * size, cache_modifier=".cg")
    x_scales = tl.load(x_scales_ptr + tokens, mask=tokens < num_rows, other=0.0)
    acc *= x_scales[None, :] if SWAP else x_scales[:, None]
    if not BLOCK_SCALES:
        scales = tl.load(scales_ptr + row_of)
        acc *= scales[:, None] if SWAP else scales[None, :]
    if BIAS:
        bias = tl.load(bias_ptr + row_of).to(tl.float32)
        acc += bias[:, None] if SWAP else bias[None, :]
    y = acc.to(outs.dtype)
    if SWAP:
        y = y.T
    if RESIDUAL and _ADDS:
        outs.atomic_add([token, row], y)
    elif RESIDUAL:
        y = y.to(tl.float32) + outs.load([token, row]).to(tl.float32)
        outs.store([token, row], y.to(outs.dtype))
    else:
        outs.store([token, row], y)


def fp8_linear_triton(
    x: Fp8Rows,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    tiling: Fp8Tiling | None = None,
) -> torch.Tensor:
    """`fp8_linear_torch` as one kernel, for weights that `has_fp8_product`."""
    num_rows, (size_out, size_in) = len(x.codes), weight.shape
    device = weight.codes.device
    out = torch.empty((num_rows, size_out), dtype=dtype, device=device) if residual is None else residual
    if not num_rows:
        return out
    tiling, pdl = tiling or fp8_tiling(weight, num_rows), use_pdl(x.codes)
    block_k = weight.group or tiling.block_k  # a step's columns share a scale
    stages = tiling.stages * tiling.block_k // block_k
    num_tiles = -(-num_rows // tiling.block_m) * -(-size_out // tiling.block_n)
    split = tiling.split if num_tiles <= MAX_SPLIT_TILES else 1
    sums, counters = out, out  # the kernel needs pointers, but does not use them without parts
    if split > 1:
        sums = torch.empty(num_tiles * split * tiling.block_m * tiling.block_n, dtype=torch.float32, device=device)
        counters = _counters(device)
    xs, weights, outs = (
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))
        for tensor, block in (
            (x.codes, (tiling.block_m, block_k)),
            (weight.codes, (tiling.block_n, block_k)),
            (out, (tiling.block_m, tiling.block_n)),
        )
    )
    _fp8_product_kernel[(num_tiles, split)](
        xs, weights, x.scales, weight.scales, out if bias is None else bias, outs, sums, counters, num_rows, size_out,
        size_in, weight.scales.shape[1], BLOCK_SCALES=weight.group > 0, BIAS=bias is not None,
        RESIDUAL=residual is not None, SPLIT=split, BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n, BLOCK_K=block_k, STAGES=stages, SWAP=tiling.swap, GROUP=_GROUP, PDL=pdl,
        num_warps=tiling.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def fp8_tiling(weight: QuantizedWeight, num_rows: int) -> Fp8Tiling:
    """The best tiles measured on an H200: of few rows, parts of K where too few programs would read the weight."""
    size_out, size_in = weight.shape
    tiles_n = -(-size_out // 64)
    split = 4 if tiles_n <= 32 else 2 if tiles_n <= 64 else 1
    if num_rows <= 64 and (num_rows <= 32 or tiles_n < 256):
        block_m = 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64
        return Fp8Tiling(block_m, 64, 256, 4, 4, split, swap=True)
    if num_rows <= 64:
        return Fp8Tiling(64, 128, 128, 8, 4, swap=True)
    if num_rows <= 256:
        long = size_in >= 8192
        return Fp8Tiling(128, 64, 128, 4, 6, 2, swap=True) if long else Fp8Tiling(128, 64, 256, 4, 3, swap=True)
    return Fp8Tiling(128, 128, 128, 8, 4)


def has_fp8_product(weight: QuantizedWeight) -> bool:
    """True if rows of codes can be multiplied with the weight on its device."""
    return is_fp8_product(weight.form, weight.shape, weight.group, weight.scale_rows, weight.codes.device)


def is_fp8_product(form: str, shape: tuple[int, ...], group: int, scale_rows: int, device: torch.device) -> bool:
    """`has_fp8_product` of a weight that `QuantizedWeight` describes by these."""
    size_out, size_in = shape
    is_shared = (group, scale_rows) in ((0, 1), (128, 128))
    is_aligned = size_in % 16 == 0 and size_out % 8 == 0  # the copy engine's rows are multiples of 16 bytes
    return form == "fp8" and is_shared and is_aligned and multiplies_fp8(device)


def multiplies_fp8(device: torch.device) -> bool:
    """True if the device has matrix units for codes of e4m3 and the copy engine that brings them tiles."""
    return INTERPRETED or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))


class Fp8Linear(QuantizedLinear):
    """`QuantizedLinear` of a weight that `has_fp8_product`: where there is more than one row, rows become codes with
    the operation before the product. Not for deterministic mode, as the library's sums depend on the number of rows."""

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        activation: Activation,
        gated: bool = True,
        norm: Norm = rms_norm_triton,
    ) -> None:
        super().__init__(weight, bias, activation, False, gated, norm)
        self._activated_rows = partial(fp8_rows_triton, activation=activation, gated=gated)

    def _multiply(self, x: Fp8Rows, dtype: torch.dtype, residual: torch.Tensor | None = None) -> torch.Tensor:
        weight, num_rows = self.quantized, len(x.codes)
        size_out = weight.shape[0]
        many = num_rows > 64 and -(-num_rows // 128) * -(-size_out // 128) >= _LIBRARY_TILES
        if not many or weight.group or size_out % 16 or dtype != torch.bfloat16 or INTERPRETED:
            return fp8_linear_triton(x, weight, self.bias, residual, dtype)
        scales = x.scales[:, None], weight.scales[:, :size_out]
        y = torch._scaled_mm(x.codes, weight.codes.t(), *scales, out_dtype=dtype, use_fast_accum=True)
        if self.bias is not None:
            y.add_(self.bias)
        return y if residual is None else residual.add_(y)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(fp8_rows_triton(x), x.dtype)

    def normed(self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        if len(x) == 1:
            return super().normed(x, norm_weight, eps)
        rows = fp8_rows_triton(x) if norm_weight is None else normed_fp8_rows(x, norm_weight, eps, self.norm)
        return self._multiply(rows, x.dtype)

    def gated(self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        return super().gated(x, norm_weight, eps) if len(x) == 1 else self.activate(self.normed(x, norm_weight, eps))

    def gated_into(
        self,
        down: Linear,
        residual: torch.Tensor,
        norm_weight: torch.Tensor | None,
        eps: float,
        post_norm: torch.Tensor | None = None,
    ) -> None:
        if len(residual) == 1 or not isinstance(down, Fp8Linear):
            return super().gated_into(down, residual, norm_weight, eps, post_norm)
        down.add_rows_to(residual, self._activated_rows(self.normed(residual, norm_weight, eps)), post_norm, eps)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, post_norm: torch.Tensor | None = None, eps: float = 0.0
    ) -> None:
        if len(x) == 1:
            super().add_to(residual, x, post_norm, eps)
        else:
            self.add_rows_to(residual, fp8_rows_triton(x), post_norm, eps)

    def add_rows_to(self, residual: torch.Tensor, x: Fp8Rows, post_norm: torch.Tensor | None, eps: float) -> None:
        """`add_to` for rows that are codes."""
        if post_norm is None:
            self._multiply(x, residual.dtype, residual)
        else:
            self.norm(self._multiply(x, residual.dtype), post_norm, eps, residual)
