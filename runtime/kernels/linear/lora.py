"""A linear layer's LoRA adapters: y += B (A x) with A and B of each row's adapter.

Kernel `shrink` computes A x for each row, and kernel `expand` adds B times that. A one-row step does both within
`skinny_gemm`. Up to MAX_SINGLE_ROWS rows, and in deterministic mode always, a program has one row, so the row's bits
depend on nothing else. With more rows, row tiles use the tensor cores, once for each adapter in the tile; a prompt's
rows have one. Programs end at once if their rows are without an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from runtime.kernels.linear.small_results import EMPTY_WORD
from runtime.kernels.triton_language import ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl

MAX_SINGLE_ROWS = 256
_FEW_ROWS = 8  # rows up to which a shrink program has one rank and, up to _MOST_COLUMNS, all columns
_MOST_COLUMNS = 16384
_SHRINK_RANKS, _SHRINK_COLUMNS = 4, 1024  # a shrink program's with more rows
_EXPAND_OUTPUTS = 128
_TILE_ROWS, _TILE_COLUMNS, _TILE_OUTPUTS = 32, 64, 64
_LEAST_RANK = 16  # a matrix instruction's


class Adapters(NamedTuple):
    """All adapters' matrices for one fused linear layer with several parts.

    Missing parts, and ranks beyond an adapter's own, are zeros."""

    a: torch.Tensor  # [max_loras, num_parts * rank, in]
    b: torch.Tensor  # [max_loras, out, rank], scaled; rows for the first part's outputs, then the next one's
    ends: tuple[int, ...]  # outputs up to each part's end
    results: torch.Tensor  # [num_parts * rank] int32: A x in a one-row step; EMPTY_WORD until it is computed

    @property
    def rank(self) -> int:
        return self.b.shape[2]

    @property
    def first_ends(self) -> tuple[int, int]:
        """The ends of the first two parts, if there are up to three."""
        first, second, *_ = *self.ends, self.ends[-1], self.ends[-1]
        return first, second

    def write(
        self, index: int, parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None], row_order: torch.Tensor | None
    ) -> None:
        """Copy adapter `index` (from 1) to the device, on the current stream.

        A part is A [rank, in] and scaled B [part's out, rank] on the host, or None. `row_order` orders
        the first outputs, if the weight's order differs from the parts'."""
        a, b = (torch.zeros(stack.shape[1:], dtype=stack.dtype) for stack in (self.a, self.b))
        for i, pair in enumerate(parts):
            if pair is not None:
                rank, start = len(pair[0]), 0 if i == 0 else self.ends[i - 1]
                a[i * self.rank : i * self.rank + rank] = pair[0]
                b[start : self.ends[i], :rank] = pair[1]
        if row_order is not None:
            b[: len(row_order)] = b[row_order]
        self.a[index - 1].copy_(a)
        self.b[index - 1].copy_(b)


def make_adapters(
    sizes: Sequence[int], size_in: int, max_loras: int, max_rank: int, dtype: torch.dtype, device: torch.device
) -> Adapters:
    """Zeroed matrices for `max_loras` adapters on a layer; `sizes` are its parts' outputs."""
    rank = padded_rank(max_rank)
    a = torch.zeros((max_loras, len(sizes) * rank, size_in), dtype=dtype, device=device)
    b = torch.zeros((max_loras, sum(sizes), rank), dtype=dtype, device=device)
    results = torch.full((len(sizes) * rank,), EMPTY_WORD, dtype=torch.int32, device=device)
    return Adapters(a, b, tuple(sum(sizes[: i + 1]) for i in range(len(sizes))), results)


def padded_rank(max_rank: int) -> int:
    """The rank of the allocated matrices."""
    return max(int(next_power_of_2(max_rank)), _LEAST_RANK)


AddAdapters = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Adapters], None]  # `add_adapters_torch`


def add_adapters_torch(
    y: torch.Tensor,  # [num_tokens, out], added to in place
    x: torch.Tensor,  # [num_tokens, in], y's dtype
    rows: torch.Tensor,  # [num_tokens] each row's adapter index; 0 for none
    adapters: Adapters,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.linear,  # multiplies rows with a weight
) -> None:
    """y += B (A x), one adapter after another."""
    rank, starts = adapters.rank, (0, *adapters.ends)
    for index in rows.unique().tolist():
        if index == 0:
            continue
        at = (rows == index).nonzero().flatten()
        small = multiply(x.index_select(0, at), adapters.a[index - 1])
        added = [
            multiply(part.contiguous(), adapters.b[index - 1, starts[i] : adapters.ends[i]])
            for i, part in enumerate(small.split(rank, 1))
        ]
        y.index_add_(0, at, torch.cat(added, 1))


def add_adapters_exact(
    y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, adapters: Adapters, product: Callable[..., Any]
) -> None:
    """`add_adapters_torch`, batch-invariant: small matrices are packed for each call by `product`."""
    add_adapters_torch(y, x, rows, adapters, multiply=lambda x, weight: product(weight)(x))


class RowAdapters(NamedTuple):
    """The adapters of a step's rows for one fused layer."""

    rows: torch.Tensor  # [num_tokens]
    adapters: Adapters
    add: AddAdapters

    def __call__(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add B (A x) of each row to y."""
        self.add(y, x, self.rows, self.adapters)


@jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def _shrink_row_kernel(
    x_ptr,  # [num_tokens, K], rows x_stride apart
    rows_ptr,  # [num_tokens]
    a_ptr,  # [max_loras, NUM_RANKS, K]
    small_ptr,  # [num_tokens, NUM_RANKS] fp32
    x_stride,
    K: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, j): BLOCK_R rows of A with x's row i.

    A's tiles are requested one iteration ahead, and the first one before the wait for the previous kernel."""
    token = tl.program_id(0)
    ranks = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_K)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.load(rows_ptr + token).to(tl.int64)
    a = a_ptr + ((index - 1) * NUM_RANKS + ranks)[:, None] * K + cols
    tile = tl.load(a, mask=cols < tl.where(index > 0, K, 0), other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if index > 0:
        x = x_ptr + token.to(tl.int64) * x_stride + cols
        acc = tl.zeros((BLOCK_R, BLOCK_K), tl.float32)
        for start in tl.range(0, K, BLOCK_K):
            inside = cols < K - start
            values = tl.load(x + start, mask=inside, other=0.0).to(tl.float32)
            acc += tile.to(tl.float32) * values
            tile = tl.load(a + start + BLOCK_K, mask=cols < K - start - BLOCK_K, other=0.0)
        tl.store(small_ptr + token * NUM_RANKS + ranks, tl.sum(acc, 1))


@jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def _expand_row_kernel(
    small_ptr,  # [num_tokens, NUM_RANKS] fp32
    rows_ptr,  # [num_tokens]
    b_ptr,  # [max_loras, N, RANK]
    y_ptr,  # [num_tokens, N], rows y_stride apart
    y_stride,
    N,
    END_0,  # outputs up to the first part's end; END_1: the second's
    END_1,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, j): BLOCK_N outputs of row i."""
    token = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ranks = tl.arange(0, RANK)[None, :]
    part = (cols >= END_0).to(tl.int32) + (cols >= END_1).to(tl.int32)
    inside = cols < N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.load(rows_ptr + token).to(tl.int64)
    is_adapted = (cols < tl.where(index > 0, N, 0))[:, None]
    b = tl.load(b_ptr + ((index - 1) * N + cols)[:, None] * RANK + ranks, mask=is_adapted, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if index > 0:
        small = tl.load(small_ptr + token * NUM_RANKS + part[:, None] * RANK + ranks, mask=inside[:, None], other=0.0)
        y = y_ptr + token.to(tl.int64) * y_stride + cols
        total = tl.load(y, mask=inside, other=0.0).to(tl.float32) + tl.sum(b.to(tl.float32) * small, 1)
        tl.store(y, total.to(y_ptr.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _shrink_tile_kernel(
    x_ptr,  # see above
    rows_ptr,
    a_ptr,
    small_ptr,
    x_stride,
    num_tokens,
    K: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, j): a part's rows of A with a tile of x."""
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    ranks = tl.program_id(1) * RANK + tl.arange(0, RANK)
    cols = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    left = tl.load(rows_ptr + tokens, mask=tokens < num_tokens, other=0)  # adapters that remain to be multiplied
    acc = tl.zeros((BLOCK_M, RANK), tl.float32)
    index = tl.max(left, 0)
    while index > 0:
        own = left == index
        a = a_ptr + ((index - 1).to(tl.int64) * NUM_RANKS + ranks)[None, :] * K + cols[:, None]
        x = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + cols[None, :]
        for start in tl.range(0, K, BLOCK_K):
            inside = cols < K - start
            tile = tl.load(x + start, mask=own[:, None] & inside[None, :], other=0.0)
            weights = tl.load(a + start, mask=inside[:, None], other=0.0)
            acc = tl.dot(tile, weights, acc, input_precision="ieee")
        left = tl.where(own, 0, left)
        index = tl.max(left, 0)
    at = small_ptr + tokens.to(tl.int64)[:, None] * NUM_RANKS + ranks[None, :]
    tl.store(at, acc, mask=(tokens < num_tokens)[:, None])


@jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _expand_tile_kernel(
    small_ptr,  # see above
    rows_ptr,
    b_ptr,
    y_ptr,
    y_stride,
    num_tokens,
    first,  # the part's first output
    size,  # its outputs
    N,
    part,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (i, j): a tile of rows, and outputs of one part."""
    tokens = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    within = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = first + within
    ranks = tl.arange(0, RANK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    left = tl.load(rows_ptr + tokens, mask=tokens < num_tokens, other=0)
    index = tl.max(left, 0)
    if index > 0:
        small = small_ptr + tokens.to(tl.int64)[:, None] * NUM_RANKS + part * RANK + ranks[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        while index > 0:
            own = left == index
            b = b_ptr + ((index - 1).to(tl.int64) * N + cols)[None, :] * RANK + ranks[:, None]
            weights = tl.load(b, mask=(within < size)[None, :], other=0.0)
            tile = tl.load(small, mask=own[:, None], other=0.0).to(weights.dtype)
            acc = tl.dot(tile, weights, acc, input_precision="ieee")
            left = tl.where(own, 0, left)
            index = tl.max(left, 0)
        y = y_ptr + tokens.to(tl.int64)[:, None] * y_stride + cols[None, :]
        inside = (tokens < num_tokens)[:, None] & (within < size)[None, :]
        total = tl.load(y, mask=inside, other=0.0).to(tl.float32) + acc
        tl.store(y, total.to(y_ptr.dtype.element_ty), mask=inside)


def shrink_rows_triton(
    x: torch.Tensor,
    rows: torch.Tensor,  # not written by the kernel right before this one
    adapters: Adapters,
    deterministic: bool = False,  # the same tiles for any number of rows
) -> torch.Tensor:
    """A x of each row, [num_tokens, num_parts * rank] in fp32; not written for rows without an adapter."""
    (num_tokens, size_in), num_ranks, pdl = x.shape, adapters.a.shape[1], use_pdl(x)
    small = torch.empty((num_tokens, num_ranks), dtype=torch.float32, device=x.device)
    few = num_tokens <= _FEW_ROWS and not deterministic
    block_r, most = (1, _MOST_COLUMNS) if few else (_SHRINK_RANKS, _SHRINK_COLUMNS)
    block_k = min(most, next_power_of_2(size_in))
    _shrink_row_kernel[(num_tokens, num_ranks // block_r)](
        x, rows, adapters.a, small, x.stride(0), K=size_in, NUM_RANKS=num_ranks, BLOCK_R=block_r, BLOCK_K=block_k,
        PDL=pdl, num_warps=8 if block_k > 2048 else 4, launch_pdl=pdl,
    )  # fmt: skip
    return small


def add_adapters_triton(
    y: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, adapters: Adapters, deterministic: bool = False
) -> None:
    """`add_adapters_torch` as two kernels, for maps of up to three parts; sums are in fp32."""
    (num_tokens, size_in), size_out = x.shape, y.shape[1]
    a, b, ends, _ = adapters
    rank, num_parts, pdl = adapters.rank, len(ends), use_pdl(x)
    shape = {"RANK": rank, "NUM_RANKS": num_parts * rank, "PDL": pdl, "launch_pdl": pdl}
    if deterministic or num_tokens <= MAX_SINGLE_ROWS:
        small = shrink_rows_triton(x, rows, adapters, deterministic=deterministic)
        first, second = adapters.first_ends
        _expand_row_kernel[(num_tokens, -(-size_out // _EXPAND_OUTPUTS))](
            small, rows, b, y, y.stride(0), size_out, first, second, BLOCK_N=_EXPAND_OUTPUTS, num_warps=4, **shape
        )
        return
    small = torch.empty((num_tokens, num_parts * rank), dtype=torch.float32, device=x.device)
    num_tiles = -(-num_tokens // _TILE_ROWS)
    _shrink_tile_kernel[(num_tiles, num_parts)](
        x, rows, a, small, x.stride(0), num_tokens, K=size_in, BLOCK_M=_TILE_ROWS, BLOCK_K=_TILE_COLUMNS,
        num_warps=4, **shape,
    )  # fmt: skip
    for part, (first, end) in enumerate(zip((0, *ends), ends, strict=False)):
        _expand_tile_kernel[(num_tiles, -(-(end - first) // _TILE_OUTPUTS))](
            small, rows, b, y, y.stride(0), num_tokens, first, end - first, size_out, part,
            BLOCK_M=_TILE_ROWS, BLOCK_N=_TILE_OUTPUTS, num_warps=4, **shape,
        )  # fmt: skip
