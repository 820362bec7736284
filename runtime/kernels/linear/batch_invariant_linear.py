"""Linear layers whose every output has the same bits in any batch, for deterministic mode on a GPU.

An output is a sum over K, in the order that `sum_order` gives the weight. How many rows there are only decides how
tiles are laid over the product, and whether its chunks are computed one after the other in a program (many rows) or by
programs side by side, the last of which adds their sums (fewer rows: without that, too few programs would read the
weight). Up to 16 rows `skinny_gemm` has the same order, and the same bits, in fewer and faster steps.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from runtime.kernels.linear.sum_order import SumOrder, sum_order
from runtime.kernels.triton_language import TensorDescriptor, jit, tl, use_pdl

_NUM_SMS = 132  # of an H100 or H200; on other cards the same tiling works, only slower
_GROUP = 8  # tiles of x that neighbouring programs share a tile of the weight with
MAX_SPLIT_TILES = 1024  # of a product whose chunks are computed side by side


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
    K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,  # out is added to
    SPLIT: tl.constexpr,  # program (i, j): tile i, chunk j; otherwise tile i, all chunks
    NUM_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,  # columns; a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,  # rows of the weight are those of the matrix instruction
    TENSOR_MAPS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group_start = tile // (GROUP * tiles_n) * GROUP
    group_size = tl.minimum(tiles_m - group_start, GROUP)
    within = tile % (GROUP * tiles_n)
    token = (group_start + within % group_size) * BLOCK_M
    row = within // group_size * BLOCK_N
    tokens = token + tl.arange(0, BLOCK_M)
    rows = row + tl.arange(0, BLOCK_N)
    live = (tokens < num_rows)[:, None]  # reading some row in place of those past the end would make its lines hot
    if TENSOR_MAPS:
        xs, weights = x_ptr, weight_ptr
    else:
        cols = tl.arange(0, BLOCK_K)[None, :]
        xs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols
        weights = weight_ptr + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + cols
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    first = tl.program_id(1) * CHUNK
    total = _chunk_sum(
        xs, live, weights, token, row, first, K, CHUNK, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, SWAP, TENSOR_MAPS
    )
    if not SPLIT:
        for start in tl.range(CHUNK, K, CHUNK):
            total += _chunk_sum(
                xs, live, weights, token, row, start, K, CHUNK, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, SWAP, TENSOR_MAPS
            )

    # Both of the tile's shape, [BLOCK_N, BLOCK_M] with SWAP.
    at_tokens = tokens.to(tl.int64)[None, :] if SWAP else tokens.to(tl.int64)[:, None]
    at_rows = rows[:, None] if SWAP else rows[None, :]
    at = at_tokens * N + at_rows
    inside = (at_tokens < num_rows) & (at_rows < N)
    if SPLIT:
        size = num_rows.to(tl.int64) * N
        tl.store(sums_ptr + tl.program_id(1) * size + at, total, mask=inside)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu") != NUM_CHUNKS - 1:
            return
        tl.store(counters_ptr + tile, 0)
        total = tl.load(sums_ptr + at, mask=inside, other=0.0, cache_modifier=".cg")
        for chunk in tl.static_range(1, NUM_CHUNKS):
            total += tl.load(sums_ptr + chunk * size + at, mask=inside, other=0.0, cache_modifier=".cg")
    if BIAS:
        bias = tl.load(bias_ptr + tl.minimum(rows, N - 1)).to(tl.float32)
        total += bias[:, None] if SWAP else bias[None, :]
    if RESIDUAL:
        total += tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _chunk_sum(
    xs,  # [BLOCK_M, BLOCK_K] pointers to column 0 on, or a descriptor
    live,  # [BLOCK_M, 1]: which rows exist
    weights,  # [BLOCK_N, BLOCK_K] pointers, or a descriptor
    token,  # first row of x
    row,  # first row of the weight
    first,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    TENSOR_MAPS: tl.constexpr,
):
    """Columns first to first + CHUNK of the tile's product, fp32: [BLOCK_M, BLOCK_N], with SWAP transposed."""
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    cols = tl.arange(0, BLOCK_K)[None, :]
    for start in tl.range(first, first + CHUNK, BLOCK_K, num_stages=STAGES):
        if TENSOR_MAPS:
            x, w = xs.load([token, start]), weights.load([row, start])
        elif K % CHUNK == 0:
            x, w = tl.load(xs + start, mask=live, other=0.0), tl.load(weights + start)
        else:
            x = tl.load(xs + start, mask=live & (cols < K - start), other=0.0)
            w = tl.load(weights + start, mask=cols < K - start, other=0.0)
        acc = tl.dot(w, x.T, acc, input_precision="ieee") if SWAP else tl.dot(x, w.T, acc, input_precision="ieee")
    return acc


class Tiling(NamedTuple):
    """How tiles are laid over a product. It does not affect the order of any sum."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    stages: int
    split: bool = False
    swap: bool = False


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
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((num_rows, size_out), dtype=out_dtype or x.dtype, device=x.device)
    if not num_rows:
        return out
    order = sum_order(size_out, size_in)
    tiling, pdl = choose_tiling(num_rows, size_out, order, x.dtype), use_pdl(x)
    sums, counters = out, out  # the kernel needs pointers, but does not use them without SPLIT
    if tiling.split:
        sums = torch.empty((order.num_chunks, num_rows, size_out), dtype=torch.float32, device=x.device)
        counters = _counters(x.device)
    rows_of, weights_of, tensor_maps = _operands(x, weight, tiling)
    num_tiles = -(-num_rows // tiling.block_m) * -(-size_out // tiling.block_n)
    _product_kernel[(num_tiles, order.num_chunks if tiling.split else 1)](
        rows_of, weights_of, out if bias is None else bias, out, sums, counters, x.stride(0), num_rows, size_out,
        K=size_in, BIAS=bias is not None, RESIDUAL=residual is not None,
        SPLIT=tiling.split, NUM_CHUNKS=order.num_chunks, CHUNK=order.chunk,
        BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, STAGES=tiling.stages, SWAP=tiling.swap,
        TENSOR_MAPS=tensor_maps, GROUP=_GROUP, PDL=pdl, num_warps=tiling.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    return out


def _operands(x: torch.Tensor, weight: torch.Tensor, tiling: Tiling) -> tuple[Any, Any, bool]:
    """x and the weight as descriptors, which the card's copy engine reads tiles by, and True; if their addresses or
    strides are not multiples of 16 bytes, the tensors, and False."""
    strides = x.stride(0) * x.element_size(), weight.stride(0) * weight.element_size()
    if x.element_size() == 4 or any(n % 16 for n in (x.data_ptr(), weight.data_ptr(), *strides)):
        return x, weight, False
    blocks = [tiling.block_m, tiling.block_k], [tiling.block_n, tiling.block_k]
    rows_of, weights_of = (
        TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)
        for tensor, block in zip((x, weight), blocks, strict=True)
    )
    return rows_of, weights_of, True


def choose_tiling(num_rows: int, size_out: int, order: SumOrder, dtype: torch.dtype) -> Tiling:
    """The largest tiles of which there are still enough for the multiprocessors, as measured on an H200; chunks side by
    side where there are not even enough small ones."""
    if dtype == torch.float32:  # on the FMA units
        return Tiling(32, 32, 32, 4, 2)

    def tiles(block_m: int, block_n: int) -> int:
        return -(-num_rows // block_m) * -(-size_out // block_n)

    chunked = order.num_chunks > 1
    few = chunked and 2 * tiles(128, 64) <= _NUM_SMS
    if num_rows <= 32:
        return Tiling(32, 64, 128, 4, 6, split=few, swap=True)
    if size_out % 16 or (num_rows <= 64 and tiles(64, 128) < 2 * _NUM_SMS // 3):
        return Tiling(64, 64, 128, 4, 4, split=few)  # of an odd size, larger tiles would spill registers
    if num_rows <= 64:
        return Tiling(64, 128, 64, 4, 6)
    if tiles(64, 64) <= _NUM_SMS and order.num_chunks * order.chunk <= 3072:  # so short that adding chunks would show
        return Tiling(64, 64, 128, 4, 4)
    if few and 2 * tiles(128, 64) * order.num_chunks > 3 * _NUM_SMS:
        return Tiling(128, 128, 64, 4, 4, split=True)
    if tiles(128, 64) <= _NUM_SMS:
        return Tiling(128, 64, 64, 4, 6, split=few)
    if chunked or tiles(128, 128) <= _NUM_SMS:
        return Tiling(128, 128, 64, 8, 4)
    if num_rows > 1024 or -num_rows % 256 <= num_rows // 8:
        return Tiling(256, 128, 64, 8, 4, swap=num_rows > 256)
    return Tiling(128, 256, 64, 8, 4)


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros between launches."""
    return torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)
