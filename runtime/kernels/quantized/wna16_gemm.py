"""Products of more than 16 rows with weights that are codes, decoded in registers just before the matrix units; of many
rows, with a dense copy that is made anew each time.

The weight's rows are those of the matrix instruction, as with few rows, and the order of chunks is the weight's own
(`wna16_sum_order`): with `fixed_order` a row has the bits that `wna16_skinny_gemm` gives it. Where too few
programs would read the weight, its chunks are computed side by side, and the last program adds them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from runtime.kernels.linear.batch_invariant_linear import MAX_SPLIT_TILES, _counters
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.linear_torch import AdaptedLinear, Linear, Norm
from runtime.kernels.linear.lora import RowAdapters
from runtime.kernels.linear.skinny_gemm import MAX_ROWS
from runtime.kernels.linear.sum_order import SumOrder
from runtime.kernels.norm.gated_activation import Activation
from runtime.kernels.norm.rms_norm import rms_norm_triton
from runtime.kernels.quantized.launch_configs import (
    Wna16Tiling,
    step_columns,
    wna16_sum_order,
    wna16_tiling,
)
from runtime.kernels.quantized.quantized_weight import (
    QuantizedWeight,
    decode,
    dequantize,
    kernel_options,
    upcast_nibbles,
)
from runtime.kernels.quantized.w4a16_gemm import (
    FEWEST_W4A16_ROWS,
    MAX_W4A16_ROWS,
    has_w4a16_gemm,
    w4a16_gemm_triton,
)
from runtime.kernels.quantized.wna16_skinny_gemm import (
    _add_step,
    _load_codes,
    _load_scales,
    _load_x,
    wna16_skinny_gemm_triton,
)
from runtime.kernels.triton_language import jit, tl, use_pdl

MAX_TILE_ROWS = 64  # above, a dense copy of the weight costs less time than tiles that decode it


def wna16_gemm_torch(
    x: torch.Tensor,  # [num_rows, K]
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias -> [num_rows, N], or the residual with that added."""
    y = F.linear(x, dequantize(weight).to(x.dtype), bias)
    if residual is not None:
        return residual.add_(y)
    return y.to(out_dtype or x.dtype) if out is None else out.copy_(y)


@jit(do_not_specialize=["num_rows"])
def _wna16_gemm_kernel(
    x_ptr,  # [num_rows, K], rows x_stride apart
    codes_ptr,
    scales_ptr,
    minimums_ptr,
    bias_ptr,
    out_ptr,  # [num_rows, N] contiguous
    sums_ptr,  # [NUM_CHUNKS, num_rows, N] fp32, used if SPLIT
    counters_ptr,  # [tiles] int32 zeros, used if SPLIT
    x_stride,
    num_rows,
    N,
    K: tl.constexpr,
    FORM: tl.constexpr,
    TABLE: tl.constexpr,
    ASM: tl.constexpr,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    MINIMUMS: tl.constexpr,
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
    """Program (i, j): tile i, chunk j if SPLIT, otherwise all chunks; tiles of the same weights are neighbours."""
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tokens = tl.program_id(0) % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = tl.program_id(0) // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
    row_of = tl.minimum(rows, N - 1).to(tl.int64)
    ROW_BYTES: tl.constexpr = K // 2 if PLANE else K
    WIDTH: tl.constexpr = PLANE if PLANE else BLOCK_K
    cols = tl.arange(0, WIDTH)[None, :]
    codes = codes_ptr + row_of[:, None] * ROW_BYTES + cols
    xs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols
    live = (tokens < num_rows)[:, None]
    groups = tl.zeros((1, 1), tl.int32)
    scales = scales_ptr + (row_of // SCALE_ROWS)[:, None]
    minimums = minimums_ptr + (row_of // SCALE_ROWS)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = _chunk(
        codes, xs, scales, minimums, cols, groups, live, tl.program_id(1) * CHUNK, K, FORM, TABLE, ASM, PLANE, GROUP,
        SCALE_STRIDE, MINIMUMS, NUM_CHUNKS, CHUNK, BLOCK_M, BLOCK_N, BLOCK_K, ROW_BYTES, STAGES,
    )  # fmt: skip
    if not SPLIT:
        for first in tl.range(CHUNK, K, CHUNK):
            total += _chunk(
                codes, xs, scales, minimums, cols, groups, live, first, K, FORM, TABLE, ASM, PLANE, GROUP,
                SCALE_STRIDE, MINIMUMS, NUM_CHUNKS, CHUNK, BLOCK_M, BLOCK_N, BLOCK_K, ROW_BYTES, STAGES,
            )  # fmt: skip
    at = tokens.to(tl.int64)[None, :] * N + rows[:, None]
    inside = (tokens < num_rows)[None, :] & (rows < N)[:, None]
    if SPLIT:
        size = num_rows.to(tl.int64) * N
        tl.store(sums_ptr + tl.program_id(1) * size + at, total, mask=inside)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        if tl.atomic_add(counters_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu") != NUM_CHUNKS - 1:
            return
        tl.store(counters_ptr + tl.program_id(0), 0)
        total = tl.load(sums_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
        for chunk in tl.static_range(1, NUM_CHUNKS):
            total += tl.load(sums_ptr + chunk * size + at, mask=inside, other=0.0, cache_modifier=".cg")
    if not GROUP:
        total *= tl.load(scales_ptr + row_of)[:, None]
    if BIAS:
        total += tl.load(bias_ptr + row_of).to(tl.float32)[:, None]
    if RESIDUAL:
        total += tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _chunk(
    codes, xs, scales, minimums, cols, groups, live, first,
    K: tl.constexpr, FORM: tl.constexpr, TABLE: tl.constexpr, ASM: tl.constexpr, PLANE: tl.constexpr,
    GROUP: tl.constexpr, SCALE_STRIDE: tl.constexpr, MINIMUMS: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROW_BYTES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Columns first to first + CHUNK of the tile's product, float32 [BLOCK_N, BLOCK_M]."""
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    WHOLE: tl.constexpr = K % CHUNK == 0
    for start in tl.range(first, first + CHUNK, BLOCK_K, num_stages=STAGES):
        w = _load_codes(codes, cols, start // 2 if PLANE else start, ROW_BYTES, WHOLE)
        x = _load_x(xs, xs, cols, live, start, K, PLANE, False, WHOLE)
        step_scales = _load_scales(scales, minimums, groups, start, K, PLANE, GROUP, SCALE_STRIDE, MINIMUMS, WHOLE)
        acc = _add_step(w, x, step_scales, acc, FORM, TABLE, ASM, PLANE, GROUP, MINIMUMS, 1)
    return acc


def wna16_gemm_triton(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    fixed_order: bool = False,  # a row has the bits that few rows of that order have
    tiling: Wna16Tiling | None = None,
) -> torch.Tensor:
    """`wna16_gemm_torch` with fp32 sums."""
    num_rows, (size_out, size_in) = len(x), weight.shape
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((num_rows, size_out), dtype=out_dtype or x.dtype, device=x.device)
    if not num_rows:
        return out
    tiling, pdl = tiling or wna16_tiling(weight, num_rows, fixed_order), use_pdl(x)
    num_tiles = -(-num_rows // tiling.block_m) * -(-size_out // tiling.block_n)
    order = SumOrder(1, -(-size_in // 128) * 128)
    if fixed_order or tiling.split:
        order = wna16_sum_order(size_out, size_in)
    split = tiling.split and order.num_chunks > 1 and num_tiles <= MAX_SPLIT_TILES
    sums, counters = out, out  # the kernel needs pointers, but does not use them without SPLIT
    if split:
        sums = torch.empty((order.num_chunks, num_rows, size_out), dtype=torch.float32, device=x.device)
        counters = _counters(x.device)
    options: dict[str, Any] = kernel_options(weight)
    _wna16_gemm_kernel[(num_tiles, order.num_chunks if split else 1)](
        x, weight.codes, weight.scales, weight.scales if weight.minimums is None else weight.minimums,
        out if bias is None else bias, out, sums, counters, x.stride(0), num_rows, size_out,
        K=size_in, BIAS=bias is not None, RESIDUAL=residual is not None, SPLIT=split, NUM_CHUNKS=order.num_chunks,
        CHUNK=order.chunk, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_K=step_columns(weight, tiling.block_k),
        STAGES=tiling.stages, PDL=pdl, num_warps=tiling.num_warps, launch_pdl=pdl, **options,
    )  # fmt: skip
    return out


@jit
def _dequantize_kernel(
    codes_ptr,
    scales_ptr,
    minimums_ptr,
    out_ptr,  # [N, K] contiguous
    N,
    K: tl.constexpr,
    FORM: tl.constexpr,
    TABLE: tl.constexpr,
    ASM: tl.constexpr,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    MINIMUMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (i, j): rows i * BLOCK_N and on, columns j * BLOCK_K and on."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_of = tl.minimum(rows, N - 1).to(tl.int64)[:, None]
    ROW_BYTES: tl.constexpr = K // 2 if PLANE else K
    WIDTH: tl.constexpr = PLANE if PLANE else BLOCK_K
    OFFSET: tl.constexpr = 136 if FORM == "int4" else 128
    start = tl.program_id(1) * BLOCK_K
    cols = tl.arange(0, WIDTH)[None, :]
    place = (start // 2 if PLANE else start) + cols
    w = tl.load(codes_ptr + row_of * ROW_BYTES + place, mask=place < ROW_BYTES, other=0.0)
    scales, minimums = scales_ptr + row_of // SCALE_ROWS, minimums_ptr + row_of // SCALE_ROWS
    out, inside = out_ptr + row_of * K, (rows < N)[:, None]
    if PLANE:
        low, high = upcast_nibbles(w, FORM, TABLE, ASM, tl.float32)
        if FORM == "int4" or FORM == "uint4":
            low, high = low.to(tl.float32) - OFFSET, high.to(tl.float32) - OFFSET
        _store_numbers(low, start, scales, minimums, out, inside, K, GROUP, SCALE_STRIDE, MINIMUMS)
        _store_numbers(high, start + PLANE, scales, minimums, out, inside, K, GROUP, SCALE_STRIDE, MINIMUMS)
    else:
        numbers = decode(w, ASM, tl.float32)
        _store_numbers(numbers, start, scales, minimums, out, inside, K, GROUP, SCALE_STRIDE, MINIMUMS)


@jit
def _store_numbers(
    numbers, start, scales, minimums, out, inside,
    K: tl.constexpr, GROUP: tl.constexpr, SCALE_STRIDE: tl.constexpr, MINIMUMS: tl.constexpr,
):  # fmt: skip
    cols = start + tl.arange(0, numbers.shape[1])[None, :]
    at = start // GROUP * SCALE_STRIDE if GROUP else 0
    if GROUP and numbers.shape[1] > GROUP:
        at = cols // GROUP * SCALE_STRIDE
    numbers = numbers.to(tl.float32) * tl.load(scales + at)
    if MINIMUMS:
        numbers -= tl.load(minimums + at)
    tl.store(out + cols, numbers.to(out.dtype.element_ty), mask=inside & (cols < K))


def dequantize_triton(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """`dequantize`, each number rounded once to the type."""
    size_out, size_in = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.codes.device)
    block_n, block_k = 32, step_columns(weight, 128)
    _dequantize_kernel[(-(-size_out // block_n), -(-size_in // block_k))](
        weight.codes, weight.scales, weight.scales if weight.minimums is None else weight.minimums, out, size_out,
        K=size_in, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, **kernel_options(weight),
    )  # fmt: skip
    return out


class QuantizedLinear(FusedLinear):
    """`FusedLinear` of a weight that is codes: up to max_skinny rows with the surrounding operations folded in, up to
    max_tiled, and in deterministic mode always, decoded within the product, above by cuBLAS."""

    max_skinny = MAX_ROWS
    max_tiled = MAX_TILE_ROWS

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        activation: Activation,
        deterministic: bool,
        gated: bool = True,
        norm: Norm = rms_norm_triton,
    ) -> None:
        super().__init__(weight.codes, bias, activation, deterministic, gated, norm)
        self.quantized = weight
        self.skinny_gemm = partial(wna16_skinny_gemm_triton, weight=weight, bias=bias, fixed_order=deterministic)
        self.tiled = partial(wna16_gemm_triton, weight=weight, bias=bias, fixed_order=deterministic)
        if not deterministic and has_w4a16_gemm(weight):
            self.tiled = partial(w4a16_gemm_triton, weight=weight, bias=bias)
            self.max_skinny, self.max_tiled = FEWEST_W4A16_ROWS - 1, MAX_W4A16_ROWS

    def with_adapters(self, adapters: RowAdapters) -> Linear:
        return AdaptedLinear(self, adapters)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_tiled(x):
            return self.tiled(x)
        return F.linear(x, dequantize_triton(self.quantized, x.dtype), self.bias)

    def _is_tiled(self, x: torch.Tensor) -> bool:
        return self.deterministic or len(x) <= self.max_tiled

    def _is_skinny(self, x: torch.Tensor) -> bool:
        return super()._is_skinny(x) and (self.deterministic or len(x) <= self.max_skinny)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, post_norm: torch.Tensor | None = None, eps: float = 0.0
    ) -> None:
        if post_norm is not None or self._is_skinny(x):
            super().add_to(residual, x, post_norm, eps)
        elif self._is_tiled(x):
            self.tiled(x, residual=residual)
        else:
            residual.add_(self._product(x))

    def logits(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """In float32, whatever the number of rows: a head is asked for the last rows of prompts alone."""
        if self._is_skinny(x):
            return super().logits(x, norm_weight, eps, out)
        return self.tiled(self.norm(x, norm_weight, eps), out_dtype=torch.float32, out=out)
