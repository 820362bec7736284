"""The merge of segments' results (latent_attention.py), and its product with the values' matrices in the same launch.

A program merges the results of one head of a few tokens and multiplies them with some columns of the head's matrix. It
requests its part of the matrix before the attention before it ends. Tiles of the product have one shape for any number
of tokens. A row of a product does not depend on the other rows, so a token's bits depend on its segments alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from runtime.kernels.attention.decode_attention import merge, num_sms
from runtime.kernels.attention.latent_heads import FEW, LEAST_WHOLE, MANY, WHOLE_ROWS, load_columns, multiply_columns
from runtime.kernels.attention.paged_attention import PagedRows
from runtime.kernels.triton_language import ROW_ARRAYS, constexpr, jit, next_power_of_2, tl, use_pdl

_FEW = constexpr(FEW)
_MERGED = 16384  # numbers of partial results that a program loads at a time


class Segments(NamedTuple):
    """The partial results of a launch of attention."""

    rows: PagedRows
    num_tiles: int  # of tokens
    splits: int  # segments of a row at most, in default mode
    num_segments: int  # room for segments in a tile
    acc: torch.Tensor  # [num_tiles, head tiles, num_segments, BLOCK_M, RANK]
    sums: torch.Tensor  # fp32, highest scores and sums of weights
    constants: dict[str, Any]  # of the kernel


@jit(
    do_not_specialize=["num_rows", "num_tiles", "num_splits", "num_segments"], do_not_specialize_on_alignment=ROW_ARRAYS
)
def _merge_values_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, N] contiguous; without a matrix: merged latents, with N = RANK
    weight_ptr,  # a matrix [RANK, N] of each head, weight_stride apart; or None
    starts_ptr,
    q_starts_ptr,
    acc_ptr,  # of `_latent_attention_kernel`
    sums_ptr,
    weight_stride,
    num_rows,
    num_tiles,
    num_splits,
    num_segments,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    N: tl.constexpr,
    K_STRIDE: tl.constexpr,  # between rows of a matrix
    N_STRIDE: tl.constexpr,  # between its columns
    HEADS: tl.constexpr,  # of a tile of attention, as the next constants
    TILE_TOKENS: tl.constexpr,
    NUM_ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    FIXED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program: a power of two
    ROOM: tl.constexpr,  # for the tokens of a tile: a power of two
    BLOCK_COLS: tl.constexpr,
    MERGE: tl.constexpr,  # segments loaded at a time
    LOWEST: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(2)
    dims, cols = tl.arange(0, BLOCK_RANK), tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    is_dim, is_col = dims < RANK, cols < N
    if weight_ptr is not None:  # before the wait: no kernel of a step writes weights
        weight = load_columns(
            weight_ptr + head.to(tl.int64) * weight_stride, cols, RANK, N, K_STRIDE, N_STRIDE, BLOCK_RANK
        )
    slots = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    tiles, tokens = slots // ROOM, slots % ROOM
    q_starts, counts, lengths = tiles_of(q_starts_ptr, starts_ptr, tiles, num_rows, num_tiles, TILE_TOKENS, NUM_ROWS)
    used = tokens < counts
    _, segments = segments_of(lengths, num_splits, SEGMENT, FIXED, BLOCK_N)
    segments = tl.where(used, segments, 0)
    places = (tiles * tl.cdiv(NUM_HEADS, HEADS) + head // HEADS).to(tl.int64) * num_segments
    lanes = tokens * HEADS + head % HEADS
    most = tl.max(segments, axis=0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    m = tl.full([TOKENS], LOWEST, tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    acc = tl.zeros([TOKENS, BLOCK_RANK], tl.float32)
    for first in range(0, most, MERGE):
        for i in tl.static_range(MERGE):  # their loads are in flight together
            here = first + i < segments
            sums_at = sums_ptr + (places + first + i) * (2 * BLOCK_M) + lanes
            other_m = tl.load(sums_at, mask=here, other=LOWEST)
            other_total = tl.load(sums_at + BLOCK_M, mask=here, other=0.0)
            acc_at = acc_ptr + ((places + first + i) * BLOCK_M + lanes)[:, None] * RANK + dims[None, :]
            other_acc = tl.load(acc_at, mask=here[:, None] & is_dim[None, :], other=0.0).to(tl.float32)
            if acc_ptr.dtype.element_ty != tl.float32:  # results of 16 bits are stored divided by their sums
                other_acc *= other_total[:, None]
            m, total, acc = merge(m, total, acc, other_m, other_total, other_acc)
    q_tokens = (q_starts + tokens).to(tl.int64)
    merged = (acc / tl.where(used, total, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    if weight_ptr is None:
        at = out_ptr + ((q_tokens * NUM_HEADS + head) * RANK)[:, None] + dims[None, :]
        tl.store(at, merged, mask=used[:, None] & is_dim[None, :])
    else:
        REPEATS: tl.constexpr = _FEW // TOKENS  # rows of the product with one token
        wide = tl.broadcast_to(merged[:, None, :], [TOKENS, REPEATS, BLOCK_RANK])
        values = multiply_columns(tl.reshape(wide, [_FEW, BLOCK_RANK]), weight)
        used = (used[:, None]) & (tl.arange(0, REPEATS)[None, :] == 0)
        at = tl.broadcast_to(((q_tokens * NUM_HEADS + head) * N)[:, None], [TOKENS, REPEATS])
        at, used = tl.reshape(at, [_FEW]), tl.reshape(used, [_FEW])
        at = out_ptr + at[:, None] + cols[None, :]
        tl.store(at, values.to(out_ptr.dtype.element_ty), mask=used[:, None] & is_col[None, :])


@jit
def tiles_of(q_starts_ptr, starts_ptr, tiles, num_rows, num_tiles, TILE_TOKENS: tl.constexpr, NUM_ROWS: tl.constexpr):
    """(first tokens in q, numbers of tokens, positions that the last token sees) of tiles, as `find_row` places them;
    no tokens behind the last tile."""
    is_tile = tiles < num_tiles
    rows, row_tiles = tiles, tiles * 0
    if NUM_ROWS:
        indices = tl.arange(0, NUM_ROWS)
        origin = tl.load(q_starts_ptr)
        firsts = tl.load(q_starts_ptr + indices, mask=indices < num_rows, other=0) - origin
        firsts = firsts // TILE_TOKENS + indices
        before = (firsts[None, :] <= tiles[:, None]) & (indices < num_rows)[None, :]
        rows = tl.sum(before.to(tl.int32), axis=1) - 1
        row_tiles = tiles - (tl.load(q_starts_ptr + rows) - origin) // TILE_TOKENS - rows
    q_starts = tl.load(q_starts_ptr + rows, mask=is_tile, other=0) + row_tiles * TILE_TOKENS
    counts = tl.load(q_starts_ptr + rows + 1, mask=is_tile, other=0) - q_starts
    counts = tl.where(is_tile, tl.minimum(counts, TILE_TOKENS), 0)
    return q_starts, counts, tl.load(starts_ptr + rows, mask=is_tile, other=0) + row_tiles * TILE_TOKENS + counts


@jit
def segments_of(length, num_splits, SEGMENT: tl.constexpr, FIXED: tl.constexpr, BLOCK_N: tl.constexpr):
    """(positions of a segment, number of segments) of a tile that sees `length` positions."""
    segment_len = SEGMENT
    if not FIXED:
        segment_len = tl.maximum(tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N, SEGMENT)
    return segment_len, tl.cdiv(length, segment_len)


def merge_segments_triton(segments: Segments, out: torch.Tensor) -> None:
    """Write the merged latents of the rows' tokens to `out` [num_tokens, num_heads, rank], contiguous."""
    _launch(segments, None, out, block_cols=out.shape[2], warps=4)


def can_fuse(num_tokens: int, values: torch.Tensor, deterministic: bool) -> bool:
    """True if `merge_values_triton` has tiles for these tokens and the values' matrices [num_heads, rank, N]."""
    fits = values.dtype != torch.float32 and values.shape[1] <= WHOLE_ROWS
    return fits and (deterministic or num_tokens < MANY)


def merge_values_triton(segments: Segments, values: torch.Tensor, out: torch.Tensor) -> None:
    """Write the merged latents times each head's matrix [rank, N] to `out` [num_tokens, num_heads, N], contiguous."""
    _launch(segments, values, out, *value_tile(values, len(out), num_sms(out.device)))


def value_tile(values: torch.Tensor, num_tokens: int, sms: int) -> tuple[int, int]:
    """(columns, warps) of a program. With one token, each multiprocessor has one program where tiles suffice."""
    if values.shape[0] * -(-values.shape[2] // 32) > sms:
        return 64, 8
    return 32, 4 if num_tokens <= 4 else 8  # registers for the results of more tokens


def _launch(segments: Segments, values: torch.Tensor | None, out: torch.Tensor, block_cols: int, warps: int) -> None:
    rows, num_tiles, constants = segments.rows, segments.num_tiles, segments.constants
    block_rank = max(constants["BLOCK_RANK"], LEAST_WHOLE)
    num_heads, pdl = out.shape[1], use_pdl(out)
    room = next_power_of_2(min(constants["TILE_TOKENS"], rows.max_count))
    tokens = min(FEW, next_power_of_2(num_tiles * room))
    head_stride, k_stride, n_stride = (0, 0, 0) if values is None else values.stride()
    if values is None:
        tokens = 1
    _merge_values_kernel[(-(-out.shape[2] // block_cols), -(-num_tiles * room // tokens), num_heads)](
        out, values, rows.starts, rows.q_starts, segments.acc, segments.sums, head_stride, rows.num_rows, num_tiles,
        segments.splits, segments.num_segments,
        N=out.shape[2], K_STRIDE=k_stride, N_STRIDE=n_stride, **(constants | {"BLOCK_RANK": block_rank}), TOKENS=tokens,
        ROOM=room, BLOCK_COLS=next_power_of_2(block_cols),
        MERGE=max(1, min(16, _MERGED // (tokens * block_rank))), PDL=pdl, num_warps=warps,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
