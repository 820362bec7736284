"""Attention over latents in the absorbed form (latent_torch.py), for rows with any number of tokens.

All heads read the same vectors: a tile's rows are the heads of one token, or of several in a row. Each
vector is read once, as a key and, without its rotary part, as a value.

Few tiles would leave most of a GPU idle, and a long row would outlast short ones. Different programs then attend to
segments of a row's positions, and a second kernel merges their results. Each program there has a part of one token's
head. By default, the longest rows have the most segments (segments.py).

In deterministic mode, segments lie at fixed positions, and tiles have one shape. A token's bits then depend only on
its own q and on the vectors that it sees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from runtime.kernels.attention.latent_expanded import attend_expanded, can_expand
from runtime.kernels.attention.latent_heads import head_product_triton
from runtime.kernels.attention.latent_torch import LatentUp
from runtime.kernels.attention.paged_attention import (
    LOG2_E,
    AttentionForm,
    PagedBatch,
    PagedRows,
    find_places,
    find_row,
    first_total,
    is_inside,
    rows_searched,
    softmax_step,
)
from runtime.kernels.attention.segments import find_segments, load_segment, merge, num_sms, store_segment
from runtime.kernels.triton_language import ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl

_TILE_ROWS = 16  # the smallest matrix instruction's rows; every tile's in deterministic mode
_MOST_ROWS = 64  # rows in a tile: with more, its sums do not fit into registers
_FIXED_SEGMENT = 512  # positions, deterministic mode
_MAX_SPLITS = 64
_LEAST_SEGMENT = 32  # positions
_MERGED_PART = 128  # head elements that a program merges
_MERGING = 32  # such programs that an SM runs at a time
_MAX_PARTIAL = 1 << 25  # elements in segments' results; with more, tiles are not split


class LatentTiles(NamedTuple):
    """Constants of `_latent_attention_kernel` and `_merge_latents_kernel`."""

    block_size: int
    num_heads: int
    head_dim: int
    rank: int
    rope: int
    heads: int  # heads in a tile
    tile_tokens: int  # most tokens of a row in one tile
    num_rows: int  # power of two, at least num_rows; 0 if a row is one tile
    segment: int  # positions per segment with `fixed`, else at least that many
    fixed: bool  # segments lie at multiples of `segment`
    split: bool  # segments are merged by another kernel, unless a tile is found to have one
    block_m: int
    block_n: int
    block_rank: int
    block_rope: int
    part: int  # part of the rank that a program merges, a power of two
    pdl: bool
    is_first: bool = False  # the launch before this one has found the segments
    merge: int = 16  # segments loaded at a time
    lowest: float = -1e30  # lower than all scores, yet finite
    first_key: int = 0
    window: int = 0  # this and the next two are for `softmax_step`
    soft_cap: float = 0.0
    scales: str = "none"


@jit(do_not_specialize=["num_rows", "num_segments"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _latent_attention_kernel(
    q_ptr,  # [num_tokens, NUM_HEADS, RANK] contiguous: queries over latents
    rope_ptr,  # [num_tokens, NUM_HEADS, ROPE], tokens rope_stride and heads HEAD_DIM apart
    kv_ptr,  # [num_blocks, BLOCK_SIZE, RANK + ROPE] contiguous
    out_ptr,  # [num_tokens, NUM_HEADS, RANK] contiguous; not written with splits
    slots_ptr,
    starts_ptr,
    q_starts_ptr,
    tables_ptr,
    acc_ptr,  # [tiles, head tiles, num_segments, BLOCK_M, RANK] fp32, each segment's result
    sums_ptr,  # [tiles, head tiles, num_segments, 2, BLOCK_M] fp32, its highest score and its sum of weights
    found_ptr,  # segments (`find_segments`), each for one program per head tile; None if all tiles have as many
    rope_stride,
    table_stride,
    num_rows,
    num_segments,  # most per row
    scale_log2,
    FORM: tl.constexpr,  # `LatentTiles`
):
    tile, head_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_head_tiles, num_splits = tl.num_programs(1), tl.num_programs(2)
    if found_ptr is not None:
        # Places without a segment are the last ones, so that no other program waits for them.
        program, num_head_tiles = tile, tl.cdiv(FORM.num_heads, FORM.heads)
        head_tile = program % num_head_tiles
        if FORM.pdl and FORM.is_first:
            tl.extra.cuda.gdc_wait()
        q_start, count, start, slot, _, segments, begin, stop = load_segment(found_ptr, program // num_head_tiles)
        table_ptr = tables_ptr + slot.to(tl.int64) * table_stride
        if (count <= 0) & (program > 0):  # program 0 waits always: a launch must not end before its predecessor
            return
    else:
        row, q_start, count, start = find_tile(starts_ptr, q_starts_ptr, tile, num_rows, FORM)
        table_ptr = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
        length = start + count
        segment_len, segments = segments_of(length, num_splits, FORM)
    if FORM.pdl:  # rows and tables are older than the launch before this one
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (count <= 0) | (split >= segments):
        return

    lanes, dims, rope_dims = tl.arange(0, FORM.block_m), tl.arange(0, FORM.block_rank), tl.arange(0, FORM.block_rope)
    q_positions = start + lanes // FORM.heads
    heads = head_tile * FORM.heads + lanes % FORM.heads
    used = (lanes < count * FORM.heads) & (heads < FORM.num_heads)
    q_tokens = (q_start + lanes // FORM.heads).to(tl.int64)
    if found_ptr is None:
        q_at = ((q_tokens * FORM.num_heads + heads) * FORM.rank)[:, None] + dims[None, :]
    else:  # a tile with several tokens has all their heads; small offsets from its first one take fewer registers
        first = (q_start.to(tl.int64) * FORM.num_heads + head_tile * FORM.heads) * FORM.rank
        q_ptr, out_ptr, q_at = q_ptr + first, out_ptr + first, lanes[:, None] * FORM.rank + dims[None, :]
    whole = used[:, None] & (dims < FORM.rank)[None, :]
    q = tl.load(q_ptr + q_at, mask=whole, other=0.0)
    rope_at = (q_tokens * rope_stride + heads * FORM.head_dim)[:, None] + rope_dims[None, :]
    q_rope = tl.load(rope_ptr + rope_at, mask=used[:, None] & (rope_dims < FORM.rope)[None, :], other=0.0)
    place = (tile * num_head_tiles + head_tile).to(tl.int64) * num_segments

    m = tl.full([FORM.block_m], FORM.lowest, tl.float32)
    total = first_total(q_positions, FORM)
    acc = tl.full([FORM.block_m, FORM.block_rank], 0, tl.float32)
    if FORM.fixed:
        for segment in range(split, segments, num_splits):
            segment_m, segment_total, segment_acc = attend_latents(
                q, q_rope, q_positions, kv_ptr, table_ptr, segment * FORM.segment,
                tl.minimum((segment + 1) * FORM.segment, length), tl.full([FORM.block_m], FORM.lowest, tl.float32),
                first_total(q_positions, FORM), tl.full([FORM.block_m, FORM.block_rank], 0, tl.float32),
                scale_log2, FORM,
            )  # fmt: skip
            if FORM.split:
                store_segment(
                    acc_ptr, sums_ptr, place + segment, segment_m, segment_total, segment_acc, lanes, dims, used, whole,
                    FORM.block_m, FORM.rank,
                )  # fmt: skip
            else:
                m, total, acc = merge(m, total, acc, segment_m, segment_total, segment_acc)
    else:  # one segment a program
        if found_ptr is None:
            begin = split * segment_len
            stop = tl.minimum(begin + segment_len, length)
        m, total, acc = attend_latents(
            q, q_rope, q_positions, kv_ptr, table_ptr, begin, stop, m, total, acc, scale_log2, FORM
        )
        if found_ptr is not None:
            if segments > 1:
                store_segment(
                    acc_ptr, sums_ptr, program, m, total, acc, lanes, dims, used, whole, FORM.block_m, FORM.rank
                )
            else:
                tl.store(out_ptr + q_at, (acc * (1 / total)[:, None]).to(out_ptr.dtype.element_ty), mask=whole)
        elif FORM.split:
            store_segment(
                acc_ptr, sums_ptr, place + split, m, total, acc, lanes, dims, used, whole, FORM.block_m, FORM.rank
            )
    if not FORM.split:
        tl.store(out_ptr + q_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=whole)


@jit
def find_tile(starts_ptr, q_starts_ptr, tile, num_rows, FORM: tl.constexpr):
    """(row, the tile's first token in q, its number of tokens, its first token's position)."""
    if FORM.num_rows:
        row, row_tile = find_row(q_starts_ptr, tile, num_rows, FORM.tile_tokens, FORM.num_rows)
    else:
        row, row_tile = tile, 0
    q_start = tl.load(q_starts_ptr + row) + row_tile * FORM.tile_tokens
    count = tl.minimum(tl.load(q_starts_ptr + row + 1) - q_start, FORM.tile_tokens)
    return row, q_start, count, tl.load(starts_ptr + row) + row_tile * FORM.tile_tokens


@jit
def segments_of(length, num_splits, FORM: tl.constexpr):
    """(positions per segment, number of segments) for a tile that sees `length` positions."""
    segment_len = FORM.segment
    if not FORM.fixed:
        segment_len = tl.maximum(tl.cdiv(tl.cdiv(length, num_splits), FORM.block_n) * FORM.block_n, FORM.segment)
    return segment_len, tl.cdiv(length, segment_len)


@jit
def attend_latents(
    q,  # [M, BLOCK_RANK]
    q_rope,  # [M, BLOCK_ROPE]
    q_positions,  # [M]
    kv_ptr,
    table_ptr,
    begin,
    stop,
    m,
    total,
    acc,
    scale_log2,
    FORM: tl.constexpr,
):
    """Absorbs positions begin..stop, begin at a multiple of BLOCK_N, into a running softmax."""
    dims, rope_dims = tl.arange(0, FORM.block_rank)[None, :], tl.arange(0, FORM.block_rope)[None, :]
    for at in range(begin, stop, FORM.block_n):
        positions = at + tl.arange(0, FORM.block_n)
        inside = is_inside(positions, FORM.first_key, stop, FORM)
        vectors = (
            kv_ptr + (find_places(table_ptr, positions, inside, FORM.block_size) * (FORM.rank + FORM.rope))[:, None]
        )
        # Zeros where not inside: what lies beyond a row may be anything, and zero times NaN is NaN.
        latents = tl.load(vectors + dims, mask=inside[:, None] & (dims < FORM.rank), other=0.0)
        keys = tl.load(vectors + FORM.rank + rope_dims, mask=inside[:, None] & (rope_dims < FORM.rope), other=0.0)
        scores = tl.dot(q_rope, tl.trans(keys), input_precision="ieee")
        scores = tl.dot(q, tl.trans(latents), scores, input_precision="ieee")
        m, total, weights, fade = softmax_step(
            scores, None, None, positions, q_positions, q_positions, m, total, scale_log2, True, FORM
        )
        acc = tl.dot(weights.to(latents.dtype), latents, acc * fade[:, None], input_precision="ieee")
    return m, total, acc


@jit(do_not_specialize=["num_rows", "num_splits", "num_segments"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _merge_latents_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, RANK] contiguous
    starts_ptr,
    q_starts_ptr,
    acc_ptr,  # written by `_latent_attention_kernel`
    sums_ptr,
    num_rows,
    num_splits,
    num_segments,
    FORM: tl.constexpr,  # `LatentTiles`
):
    """A part of one head for a tile's tokens, one after another."""
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    _, q_start, count, start = find_tile(starts_ptr, q_starts_ptr, tile, num_rows, FORM)
    _, segments = segments_of(start + count, num_splits, FORM)
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dims = part * FORM.part + tl.arange(0, FORM.part)[None, :]
    tile_of_head = tile * tl.cdiv(FORM.num_heads, FORM.heads) + head // FORM.heads
    for token in range(count):
        lane = token * FORM.heads + head % FORM.heads
        acc = merge_lane(acc_ptr, sums_ptr, tile_of_head.to(tl.int64) * num_segments, 1, segments, lane, dims, FORM)
        at = out_ptr + ((q_start + token).to(tl.int64) * FORM.num_heads + head) * FORM.rank + dims
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=dims < FORM.rank)


@jit
def _merge_found_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, RANK] contiguous
    acc_ptr,  # written by `_latent_attention_kernel`
    sums_ptr,
    found_ptr,
    FORM: tl.constexpr,  # `LatentTiles`
):
    """A part of some heads and tokens in a tile with several segments. Each of these has as many programs."""
    program, share, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_head_tiles = tl.cdiv(FORM.num_heads, FORM.heads)
    head_tile = program % num_head_tiles
    q_start, count, _, _, segment, segments, _, _ = load_segment(found_ptr, program // num_head_tiles)
    heads = tl.minimum(FORM.num_heads - head_tile * FORM.heads, FORM.heads)
    first, pairs = segment * tl.num_programs(1) + share, count * heads
    is_idle = (segments <= 1) | (first >= pairs)
    if is_idle & (program > 0):  # program 0 waits always: a launch must not end before its predecessor
        return
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if is_idle:
        return
    dims = part * FORM.part + tl.arange(0, FORM.part)[None, :]
    for pair in range(first, pairs, segments * tl.num_programs(1)):
        token, head = pair // heads, pair % heads
        lane = token * FORM.heads + head
        acc = merge_lane(
            acc_ptr, sums_ptr, program - segment * num_head_tiles, num_head_tiles, segments, lane, dims, FORM
        )
        head += head_tile * FORM.heads
        at = out_ptr + ((q_start + token).to(tl.int64) * FORM.num_heads + head) * FORM.rank + dims
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=dims < FORM.rank)


@jit
def merge_lane(acc_ptr, sums_ptr, first_place, stride, segments, lane, dims, FORM: tl.constexpr):
    """A part of one head's result for a token, from segments `stride` places apart."""
    m = tl.full([1], FORM.lowest, tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.full([1, FORM.part], 0, tl.float32)
    for first in range(0, segments, FORM.merge):
        for i in tl.static_range(tl.constexpr(FORM.merge)):  # their loads are in flight together
            here = tl.full([1], first + i, tl.int32) < segments
            place = first_place + (first + i) * stride
            sums_at = sums_ptr + place * (2 * FORM.block_m) + lane + tl.zeros([1], tl.int32)
            other_m = tl.load(sums_at, mask=here, other=FORM.lowest)
            other_total = tl.load(sums_at + FORM.block_m, mask=here, other=0.0)
            acc_at = acc_ptr + place * (FORM.block_m * FORM.rank) + lane * FORM.rank + dims
            other_acc = tl.load(acc_at, mask=here[:, None] & (dims < FORM.rank), other=0.0)
            m, total, acc = merge(m, total, acc, other_m, other_total, other_acc)
    return acc / total[:, None]


def attend_rows(
    q: torch.Tensor,  # [num_tokens, num_heads, rank] contiguous, queries over latents
    rope: torch.Tensor,  # [num_tokens, num_heads, rope_dim], a part of q's heads, rotated
    kv: torch.Tensor,  # [1, 1, num_blocks, block_size, rank + rope_dim] contiguous
    rows: PagedRows,
    *,
    scale: float,
    first_key: int = 0,
    deterministic: bool = False,
    out: torch.Tensor | None = None,  # [num_tokens, num_heads, rank] contiguous
) -> torch.Tensor:
    """Each head's weighted sums of latents, [num_tokens, num_heads, rank]; lengths do not shape the grid."""
    (num_tokens, num_heads, rank), rope_dim, block_size = q.shape, rope.shape[2], kv.shape[3]
    out = torch.empty_like(q) if out is None else out
    if not num_tokens:
        return out
    sms = num_sms(q.device)
    block_m = _TILE_ROWS if deterministic else _tile_rows(num_heads, rows, sms)
    head_tiles, tile_tokens, num_tiles = _tiles(block_m, num_heads, rows)
    programs = num_tiles * head_tiles
    block_n, warps, stages = _tile(block_m, q.dtype, deterministic)
    splits = max(1, min(sms // programs, _MAX_SPLITS))
    segment = _FIXED_SEGMENT if deterministic else block_n
    segments = -(-rows.max_len // segment)
    slots = max(1, sms // head_tiles)
    places = min(num_tiles + slots, num_tiles * segments)  # most segments in default mode
    is_found = not deterministic and 1 < num_tiles < places <= _MAX_PARTIAL // (head_tiles * block_m * rank)
    splits = min(splits, segments)
    if not deterministic:
        segments = splits
    elif programs * segments * block_m * rank > _MAX_PARTIAL:
        splits = 1
    split = is_found or splits > 1
    partial_rows = (head_tiles * places if is_found else programs * segments) * block_m if split else 0
    acc, sums = (torch.empty(partial_rows * size, dtype=torch.float32, device=q.device) for size in (rank, 2))
    pdl = use_pdl(q)
    part = min(_MERGED_PART, next_power_of_2(rank))
    found, is_first = None, False
    if is_found:
        found, is_first = find_segments(rows, places, slots, tile_tokens, block_n, pdl)
    form = LatentTiles(
        block_size, num_heads, rope.stride(1), rank, rope_dim, heads=-(-num_heads // head_tiles),
        tile_tokens=tile_tokens, num_rows=0 if num_tiles == rows.num_rows else rows_searched(rows.num_rows),
        segment=segment, fixed=deterministic, split=split, block_m=block_m, block_n=block_n,
        block_rank=next_power_of_2(rank), block_rope=max(_TILE_ROWS, next_power_of_2(rope_dim)), part=part, pdl=pdl,
        is_first=is_first, first_key=first_key,
    )  # fmt: skip
    options = {"launch_pdl": True} if pdl else {}
    _latent_attention_kernel[(head_tiles * places,) if is_found else (num_tiles, head_tiles, splits)](
        q, rope, kv, out, rows.slots, rows.starts, rows.q_starts, rows.tables, acc, sums, found, rope.stride(0),
        rows.tables.stride(0), rows.num_rows, segments, scale * LOG2_E, form, num_warps=warps, num_stages=stages,
        **options,
    )  # fmt: skip
    parts = -(-rank // part)
    if is_found:
        # Enough programs for equal rows, or for two segments. More than an SM runs at a time would delay idle ones.
        shares = -(-form.heads * tile_tokens // max(2, slots // num_tiles))
        shares = max(1, min(shares, _MERGING * sms // (head_tiles * places * parts)))
        _merge_found_kernel[(head_tiles * places, shares, parts)](
            out, acc, sums, found, form._replace(is_first=False), num_warps=1, **options
        )
    elif split:
        _merge_latents_kernel[(num_tiles, num_heads, parts)](
            out, rows.starts, rows.q_starts, acc, sums, rows.num_rows, splits, segments, form, num_warps=1, **options
        )
    return out


def _tiles(block_m: int, num_heads: int, rows: PagedRows) -> tuple[int, int, int]:
    """(head tiles, most tokens in a tile, token tiles)."""
    head_tiles = -(-num_heads // block_m)
    tile_tokens = block_m // -(-num_heads // head_tiles)
    fits = rows.max_count <= tile_tokens
    return head_tiles, tile_tokens, rows.num_rows if fits else rows.num_tokens // tile_tokens + rows.num_rows


def _tile_rows(num_heads: int, rows: PagedRows, sms: int) -> int:
    """Rows of a tile in default mode: the fewest that leave a multiprocessor for each segment. Larger tiles read a
    vector fewer times."""
    largest = min(_MOST_ROWS, next_power_of_2(min(rows.max_count, _MOST_ROWS) * num_heads))
    block_m, splits = _TILE_ROWS, min(_MAX_SPLITS, -(-rows.max_len // _LEAST_SEGMENT))
    while block_m < largest:
        head_tiles, _, num_tiles = _tiles(block_m, num_heads, rows)
        if head_tiles * num_tiles * splits <= sms:
            break
        block_m *= 2
    return block_m


def _tile(block_m: int, dtype: torch.dtype, deterministic: bool) -> tuple[int, int, int]:
    """(positions a tile, warps, pipeline stages). Places in the cache take two stages. Small tiles have short
    segments, which more stages would delay."""
    if dtype == torch.float32:
        return 16, 4, 1
    if block_m == _TILE_ROWS:
        return _LEAST_SEGMENT, 8 if deterministic else 4, 3
    return _LEAST_SEGMENT, 8, 5


def latent_attention_triton(
    q: torch.Tensor,  # heads contiguous, any stride between tokens
    kv: torch.Tensor,
    plan: PagedBatch,
    up: LatentUp,
    scale: float,
    first_key: int = 0,
    *,
    deterministic: bool = False,
) -> torch.Tensor:
    """`latent_attention_torch`. Rows of many tokens use the expanded form, unless the launch is captured."""
    attend = partial(attend_rows, kv=kv, scale=scale, first_key=first_key, deterministic=deterministic)
    absorbed = partial(_absorbed, up=up, attend=attend, deterministic=deterministic)
    *others, last = plan.parts
    first = sum(rows.num_tokens for rows in others)  # one-token rows
    if deterministic or not can_expand(q, kv, last, len(q) - first, up):
        return absorbed(q, plan.parts).flatten(1)
    out = q.new_empty((len(q), q.shape[1], up.weight.shape[1] - up.nope_dim))
    if others:
        out[:first] = absorbed(q[:first], others)
    attend_expanded(q, kv, last, up, first, form=AttentionForm(scale, first_key=first_key), out=out)
    return out.flatten(1)


def _absorbed(
    q: torch.Tensor, parts: list[PagedRows], up: LatentUp, attend: Callable[..., torch.Tensor], deterministic: bool
) -> torch.Tensor:
    """[num_tokens, num_heads, value_dim], as three or four kernels."""
    product = partial(head_product_triton, deterministic=deterministic)
    over_latents = product(q[..., : up.nope_dim], up.keys_weight)
    mixed = torch.empty_like(over_latents)
    for rows in parts:
        attend(over_latents, q[..., up.nope_dim :], rows=rows, out=mixed)
    return product(mixed, up.values_weight.transpose(1, 2))
