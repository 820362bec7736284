"""Linear layers with the same bits in any batch, for deterministic mode on a GPU.

An output is a sum over K in the order of `sum_order`. The number of rows decides two other things: the tiles, and
whether one program computes a tile's chunks. With few rows, programs compute chunks side by side, because too few
programs would read the weight otherwise, and the last program adds their sums. Up to 16 rows, `skinny_gemm` uses the
same order and returns the same bits in less time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from runtime.kernels.linear.split_k import add_parts, split_counters, store_part
from runtime.kernels.linear.sum_order import SumOrder, sum_order
from runtime.kernels.linear.tiles import Tiling, blocks_of, output_of, tile_place
from runtime.kernels.triton_language import jit, tl, use_pdl

_NUM_SMS = 132  # an H100's or H200's; on other cards the same tiling works, only slower


def batch_invariant_linear_torch(
    x: torch.Tensor,  # [num_rows, K]
    weight: torch.Tensor,  # [N, K]
    bias: torch.Tensor | None = None,  # [N]
    out_dtype: torch.dtype | None = None,  # x's dtype if None
    out: torch.Tensor | None = None,  # [num_rows, N] contiguous
    residual: torch.Tensor | None = None,  # [num_rows, N] contiguous, instead of `out`: added to in place and returned
) -> torch.Tensor:
    """x @ weight.T + bias -> [num_rows, N]; the library's own order of sums."""
    y = F.linear(x, weight, bias)
    if residual is not None:
        return residual.add_(y)
    return y.to(out_dtype or x.dtype) if out is None else out.copy_(y)


class ProductForm(NamedTuple):
    """Constants of `_product_kernel`."""

    k: int
    bias: bool
    residual: bool  # adds to out
    split: bool  # program (i, j): tile i, chunk j; else program i: tile i's chunks
    num_chunks: int
    chunk: int  # columns; a multiple of `block_k`
    block_m: int
    block_n: int
    block_k: int
    stages: int
    swap: bool  # weight rows are the matrix instruction's rows
    tensor_maps: bool
    pdl: bool


@jit(do_not_specialize=["num_rows"])
def _product_kernel(
    x_ptr,  # [num_rows, K], rows x_stride apart; if TENSOR_MAPS a descriptor with blocks [BLOCK_M, BLOCK_K]
    weight_ptr,  # [N, K] contiguous; if TENSOR_MAPS a descriptor with blocks [BLOCK_N, BLOCK_K]
    bias_ptr,  # [N], read if BIAS
    out_ptr,  # [num_rows, N] contiguous
    sums_ptr,  # [NUM_CHUNKS, num_rows, N] fp32, used if SPLIT
    counters_ptr,  # [tiles] int32 zeros, used if SPLIT
    x_stride,
    num_rows,
    N,
    FORM: tl.constexpr,  # `ProductForm`
):
    tile = tl.program_id(0)
    token, row = tile_place(tile, num_rows, N, FORM.block_m, FORM.block_n)
    tokens = token + tl.arange(0, FORM.block_m)
    rows = row + tl.arange(0, FORM.block_n)
    live = (tokens < num_rows)[:, None]  # reading an existing row for those past the end would make its lines hot
    if FORM.tensor_maps:
        xs, weights = x_ptr, weight_ptr
    else:
        cols = tl.arange(0, FORM.block_k)[None, :]
        xs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols
        weights = weight_ptr + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * FORM.k + cols
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    first = tl.program_id(1) * FORM.chunk
    total = _chunk_sum(xs, live, weights, token, row, first, FORM)
    if not FORM.split:
        for start in tl.range(FORM.chunk, FORM.k, FORM.chunk):
            total += _chunk_sum(xs, live, weights, token, row, start, FORM)

    # Both of the tile's shape, [BLOCK_N, BLOCK_M] with SWAP.
    at_tokens = tokens.to(tl.int64)[None, :] if FORM.swap else tokens.to(tl.int64)[:, None]
    at_rows = rows[:, None] if FORM.swap else rows[None, :]
    at = at_tokens * N + at_rows
    inside = (at_tokens < num_rows) & (at_rows < N)
    if FORM.split:
        size = num_rows.to(tl.int64) * N
        if store_part(sums_ptr, size, at, total, inside, counters_ptr) != FORM.num_chunks - 1:
            return
        total = add_parts(sums_ptr, size, at, inside, counters_ptr, FORM.num_chunks)
    if FORM.bias:
        bias = tl.load(bias_ptr + tl.minimum(rows, N - 1)).to(tl.float32)
        total += bias[:, None] if FORM.swap else bias[None, :]
    if FORM.residual:
        total += tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _chunk_sum(
    xs,  # [BLOCK_M, BLOCK_K] pointers to column 0 on, or a descriptor
    live,  # [BLOCK_M, 1]: which rows exist
    weights,  # [BLOCK_N, BLOCK_K] pointers, or a descriptor
    token,  # first x row
    row,  # first weight row
    first,
    FORM: tl.constexpr,
):
    """Columns first to first + CHUNK of the tile's product, fp32: [BLOCK_M, BLOCK_N], with SWAP transposed."""
    acc = tl.full((FORM.block_n, FORM.block_m) if FORM.swap else (FORM.block_m, FORM.block_n), 0, tl.float32)
    cols = tl.arange(0, FORM.block_k)[None, :]
    for start in tl.range(first, first + FORM.chunk, FORM.block_k, num_stages=FORM.stages):
        if FORM.tensor_maps:
            x, w = xs.load([token, start]), weights.load([row, start])
        elif FORM.k % FORM.chunk == 0:
            x, w = tl.load(xs + start, mask=live, other=0.0), tl.load(weights + start)
        else:
            x = tl.load(xs + start, mask=live & (cols < FORM.k - start), other=0.0)
            w = tl.load(weights + start, mask=cols < FORM.k - start, other=0.0)
        acc = tl.dot(w, x.T, acc, input_precision="ieee") if FORM.swap else tl.dot(x, w.T, acc, input_precision="ieee")
    return acc


def batch_invariant_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`batch_invariant_linear_torch` with fp32 sums in an order that only the weight's shape decides."""
    (num_rows, size_in), size_out = x.shape, weight.shape[0]
    out = output_of(x, size_out, out_dtype, out, residual)
    if not num_rows:
        return out
    order = sum_order(size_out, size_in)
    tiling, pdl = choose_tiling(num_rows, size_out, order, x.dtype), use_pdl(x)
    split = tiling.split > 1
    sums, counters = out, out  # the kernel needs pointers, but does not use them without SPLIT
    if split:
        sums = torch.empty((order.num_chunks, num_rows, size_out), dtype=torch.float32, device=x.device)
        counters = split_counters(x.device)
    rows_of, weights_of, tensor_maps = _operands(x, weight, tiling)
    num_tiles = tiling.num_tiles(num_rows, size_out)
    _product_kernel[(num_tiles, order.num_chunks if split else 1)](
        rows_of, weights_of, out if bias is None else bias, out, sums, counters, x.stride(0), num_rows, size_out,
        FORM=ProductForm(
            k=size_in, bias=bias is not None, residual=residual is not None, split=split, num_chunks=order.num_chunks,
            chunk=order.chunk, block_m=tiling.block_m, block_n=tiling.block_n, block_k=tiling.block_k,
            stages=tiling.stages, swap=tiling.swap, tensor_maps=tensor_maps, pdl=pdl,
        ),
        num_warps=tiling.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _operands(x: torch.Tensor, weight: torch.Tensor, tiling: Tiling) -> tuple[Any, Any, bool]:
    """x and the weight as descriptors for the copy engine, and True.

    If an address or a stride is not a multiple of 16 bytes, returns the tensors and False."""
    strides = x.stride(0) * x.element_size(), weight.stride(0) * weight.element_size()
    if x.element_size() == 4 or any(n % 16 for n in (x.data_ptr(), weight.data_ptr(), *strides)):
        return x, weight, False
    return blocks_of(x, tiling.block_m, tiling.block_k), blocks_of(weight, tiling.block_n, tiling.block_k), True


def choose_tiling(num_rows: int, size_out: int, order: SumOrder, dtype: torch.dtype) -> Tiling:
    """The largest tiles that still fill the multiprocessors, as measured on an H200.

    Chunks run side by side where even small tiles are too few."""
    if dtype == torch.float32:  # runs on the FMA units
        return Tiling(32, 32, 32, 4, 2)

    def tiles(block_m: int, block_n: int) -> int:
        return -(-num_rows // block_m) * -(-size_out // block_n)

    chunked = order.num_chunks > 1
    few = chunked and 2 * tiles(128, 64) <= _NUM_SMS
    parts = order.num_chunks if few else 1
    if num_rows <= 32:
        return Tiling(32, 64, 128, 4, 6, split=parts, swap=True)
    if size_out % 16 or (num_rows <= 64 and tiles(64, 128) < 2 * _NUM_SMS // 3):
        return Tiling(64, 64, 128, 4, 4, split=parts)  # larger tiles with an odd size would spill registers
    if num_rows <= 64:
        return Tiling(64, 128, 64, 4, 6)
    if tiles(64, 64) <= _NUM_SMS and order.num_chunks * order.chunk <= 3072:  # too short to hide the chunk sum
        return Tiling(64, 64, 128, 4, 4)
    if few and 2 * tiles(128, 64) * order.num_chunks > 3 * _NUM_SMS:
        return Tiling(128, 128, 64, 4, 4, split=order.num_chunks)
    if tiles(128, 64) <= _NUM_SMS:
        return Tiling(128, 64, 64, 4, 6, split=parts)
    if chunked or tiles(128, 128) <= _NUM_SMS:
        return Tiling(128, 128, 64, 8, 4)
    if num_rows > 1024 or -num_rows % 256 <= num_rows // 8:
        return Tiling(256, 128, 64, 8, 4, swap=num_rows > 256)
    return Tiling(128, 256, 64, 8, 4)
