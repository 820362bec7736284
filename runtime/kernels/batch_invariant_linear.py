"""Linear layers whose every output has the same bits in any batch, for deterministic mode on a GPU.

An output is a sum over K. Here its order belongs to the weight alone: K is cut into chunks by the weight's shape, each
chunk is summed in ascending order by one kind of matrix instruction, and the chunks' sums are added in ascending order.
How many rows there are only decides how tiles are laid over the product and whether chunks are computed one after the
other in a program (many rows) or by programs side by side whose sums a second kernel adds (few rows: without that,
too few programs would read the weight). Neither changes a bit, which tests/gpu/test_gpu_linear.py checks on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.kernels._triton import jit, tl, use_pdl

_NUM_SMS = 132  # of an H100 or H200; on other cards the same tiling works, only slower
_GROUP = 8  # tiles of x that neighbouring programs share a tile of the weight with


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
    x_ptr,  # [num_rows, K], rows x_stride apart
    weight_ptr,  # [N, K] contiguous
    bias_ptr,  # [N], read if BIAS
    out_ptr,  # [num_rows, N] contiguous, or with SPLIT sums of chunks [K / CHUNK, num_rows, N] fp32
    x_stride,
    num_rows,
    N,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,  # out is added to
    SPLIT: tl.constexpr,  # program (i, j): tile i, chunk j alone; otherwise tile i, all chunks
    CHUNK: tl.constexpr,  # columns; a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, first = tl.program_id(0), 0
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group_start = tile // (GROUP * tiles_n) * GROUP
    group_size = tl.minimum(tiles_m - group_start, GROUP)
    within = tile % (GROUP * tiles_n)
    tokens = (group_start + within % group_size) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = within // group_size * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.arange(0, BLOCK_K)[None, :]
    xs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols
    live = (tokens < num_rows)[:, None]  # reading some row in place of those past the end would make its lines hot
    weights = weight_ptr + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + cols
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    if SPLIT:
        first = tl.program_id(1) * CHUNK
    total = _chunk_sum(xs, live, weights, first, K, CHUNK, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)
    if not SPLIT:
        for start in tl.range(CHUNK, K, CHUNK):
            total += _chunk_sum(xs, live, weights, start, K, CHUNK, BLOCK_M, BLOCK_N, BLOCK_K, STAGES)

    at = tokens.to(tl.int64)[:, None] * N + rows[None, :]
    inside = (tokens < num_rows)[:, None] & (rows < N)[None, :]
    if SPLIT:
        at += tl.program_id(1).to(tl.int64) * num_rows * N
    if BIAS:
        total += tl.load(bias_ptr + tl.minimum(rows, N - 1)).to(tl.float32)[None, :]
    if RESIDUAL:
        total += tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _chunk_sum(
    xs,  # [BLOCK_M, BLOCK_K] pointers to column 0 on
    live,  # [BLOCK_M, 1]: which rows exist
    weights,  # [BLOCK_N, BLOCK_K] pointers
    first,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Columns first to first + CHUNK of the tile's product, [BLOCK_M, BLOCK_N] fp32."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    cols = tl.arange(0, BLOCK_K)[None, :]
    for start in tl.range(first, first + CHUNK, BLOCK_K, num_stages=STAGES):
        if K % CHUNK == 0:
            x, w = tl.load(xs + start, mask=live, other=0.0), tl.load(weights + start)
        else:
            x = tl.load(xs + start, mask=live & (cols < K - start), other=0.0)
            w = tl.load(weights + start, mask=cols < K - start, other=0.0)
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
    return acc


@jit(do_not_specialize=["size"])
def _add_chunks_kernel(
    sums_ptr,  # [NUM_CHUNKS, num_rows * N] fp32
    bias_ptr,  # [N], read if BIAS
    out_ptr,  # [num_rows * N]
    size,  # num_rows * N
    N,
    NUM_CHUNKS: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.load(sums_ptr + at, mask=inside, other=0.0)
    for chunk in tl.static_range(1, NUM_CHUNKS):
        total += tl.load(sums_ptr + chunk * size.to(tl.int64) + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + at % N).to(tl.float32)
    if RESIDUAL:
        total += tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


class Tiling(NamedTuple):
    """How tiles are laid over a product. It does not affect the order of any sum."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    stages: int
    split: bool


def batch_invariant_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`batch_invariant_linear_torch` with fp32 sums in an order that only the weight's shape and dtype decide."""
    (num_rows, size_in), size_out = x.shape, weight.shape[0]
    if residual is not None:
        out = residual
    elif out is None:
        out = torch.empty((num_rows, size_out), dtype=out_dtype or x.dtype, device=x.device)
    if not num_rows:
        return out
    chunk = chunk_size(size_out, size_in)
    num_chunks = -(-size_in // chunk)
    tiling, pdl = choose_tiling(num_rows, size_out, num_chunks, x.dtype), use_pdl(x)
    num_tiles = -(-num_rows // tiling.block_m) * -(-size_out // tiling.block_n)
    sums = torch.empty((num_chunks, num_rows, size_out), dtype=torch.float32, device=x.device) if tiling.split else out
    _product_kernel[(num_tiles, num_chunks if tiling.split else 1)](
        x, weight, x if bias is None else bias, sums, x.stride(0), num_rows, size_out,
        K=size_in, BIAS=bias is not None and not tiling.split,
        RESIDUAL=residual is not None and not tiling.split, SPLIT=tiling.split, CHUNK=chunk,
        BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, STAGES=tiling.stages, GROUP=_GROUP,
        PDL=pdl, num_warps=tiling.num_warps, launch_pdl=pdl,
    )  # fmt: skip
    if tiling.split:
        block = 1024
        _add_chunks_kernel[(-(-out.numel() // block),)](
            sums, x if bias is None else bias, out, out.numel(), size_out,
            NUM_CHUNKS=num_chunks, BIAS=bias is not None, RESIDUAL=residual is not None, BLOCK=block,
            PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return out


def chunk_size(size_out: int, size_in: int) -> int:
    """Columns of a chunk, at least 512: with 64 rows, each multiprocessor has about one program of 64 x 64."""
    chunk = -(-size_in // 128) * 128
    while -(-size_out // 64) * -(-size_in // chunk) < _NUM_SMS * 3 // 4 and chunk >= 1024:
        chunk = -(-chunk // 256) * 128
    return chunk


def choose_tiling(num_rows: int, size_out: int, num_chunks: int, dtype: torch.dtype) -> Tiling:
    """Small tiles and chunks side by side while the product has too few large tiles to fill the multiprocessors."""
    if dtype == torch.float32:  # on the FMA units
        return Tiling(32, 32, 32, 4, 2, split=False)
    if num_rows <= 64:
        return Tiling(64, 64, 128, 4, 4, split=num_chunks > 1)
    large = -(-num_rows // 128) * -(-size_out // 128)
    if large < _NUM_SMS:
        return Tiling(128, 64, 64, 4, 4, split=num_chunks > 1)
    if num_chunks > 1 or large < 2 * _NUM_SMS:
        return Tiling(128, 128, 64, 8, 4, split=False)
    return Tiling(128, 256, 64, 8, 4, split=False)
