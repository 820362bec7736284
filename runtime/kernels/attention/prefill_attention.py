"""Attention for rows with many tokens (prompts, or prompt chunks behind a cached prefix) over the paged cache.

A program takes a tile of consecutive tokens with one kv head's query heads, which share each key and value that it
reads. It walks over the row's positions, and masks only the last ones, which some of its tokens do not see. The grid
runs from the last row's last tile to the first row's first tile, so the longest walks start first.

Few tiles would leave programs idle in the last wave. Different programs then walk over segments of positions, and a
tile's last program merges them (segments.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.attention.decode_attention import decode_attention
from runtime.kernels.attention.paged_attention import (
    LOG2_E,
    AttentionForm,
    PagedBatch,
    PagedRows,
    add_sinks,
    attend_range,
    find_row,
    first_total,
    load_sinks,
    rows_searched,
    token_scales,
)
from runtime.kernels.attention.segments import (
    arrival_counters,
    arrives_last,
    find_segment,
    merge_segments,
    num_sms,
    store_segment,
)
from runtime.kernels.attention.stored_kv import finish_total, prepare_q, scaling
from runtime.kernels.triton_language import ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl

_LEAST_SEGMENT = 256  # positions: a walk then outweighs storing and merging its result
_MOST_PIECES, _MOST_WAVES = 16, 4  # a tile's segments, and waves of their programs
_LEAST_GAIN = 0.9  # the longest time with segments, as a part of that without them
_LEAST_WINDOW = 1024  # positions
_MERGED_ELEMENTS = 8192  # fp32 elements in segments' results loaded at a time
_MERGED_DIMS = 64  # the same for larger tiles, dimensions of one segment


class PrefillForm(NamedTuple):
    """Constants of `_prefill_attention_kernel`."""

    block_size: int
    head_dim: int
    num_kv_heads: int
    group: int  # query heads per kv head
    tile_tokens: int  # block_m // group
    num_rows: int  # power of two, at least num_rows
    is_cut: bool  # tiles are cut into segments
    least_segment: int  # positions, a multiple of `block_n`
    window: int
    first_key: int
    soft_cap: float
    scales: str  # none | head | token
    block_m: int
    block_n: int
    block_d: int
    merge: int  # segments loaded at a time
    merged_dims: int  # dimensions that are merged at a time; 0 for all
    pdl: bool


@jit(do_not_specialize=["num_rows", "pieces"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _prefill_attention_kernel(
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM], tokens q_stride apart
    kv_ptr,  # [2, num_kv_heads, num_blocks, BLOCK_SIZE, HEAD_DIM] contiguous
    scales_ptr,  # a quantized cache's scales (stored_kv.py), contiguous; not used without SCALES
    sinks_ptr,  # [num_heads] fp32, or None
    last_visible_ptr,  # [num_tokens] the last position that each token sees, or None for its own
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM] contiguous
    slots_ptr,
    starts_ptr,
    q_starts_ptr,
    tables_ptr,
    acc_ptr,  # [num_kv_heads, places, BLOCK_M, HEAD_DIM] fp32, each segment's result
    sums_ptr,  # [num_kv_heads, places, 2, BLOCK_M] fp32, its highest score and its sum of weights
    counters_ptr,  # [num_kv_heads, places] int32 zeros
    q_stride,
    kv_stride,  # elements between k and v
    head_stride,  # elements between kv heads
    table_stride,
    num_rows,
    pieces,  # segments of the longest walk
    scale_log2,
    FORM: tl.constexpr,  # `PrefillForm`
):
    if FORM.is_cut:
        kv_head, place = tl.program_id(0) % FORM.num_kv_heads, tl.program_id(0) // FORM.num_kv_heads
        num_places = tl.num_programs(0) // FORM.num_kv_heads
        row, row_tile, segment, segment_len = find_segment(
            q_starts_ptr, starts_ptr, place, num_rows, 0, pieces, FORM, True
        )
    else:
        place = tl.num_programs(0) - 1 - tl.program_id(0)
        kv_head, tile = FORM.num_kv_heads - 1 - place % FORM.num_kv_heads, place // FORM.num_kv_heads
        row, row_tile = find_row(q_starts_ptr, tile, num_rows, FORM.tile_tokens, FORM.num_rows)
    q_start = tl.load(q_starts_ptr + row) + row_tile * FORM.tile_tokens
    count = tl.minimum(tl.load(q_starts_ptr + row + 1) - q_start, FORM.tile_tokens)
    start = tl.load(starts_ptr + row) + row_tile * FORM.tile_tokens  # position of the tile's first token
    table_ptr = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
    # Rows and tables are older than the launch before this one, which has waited before it let this one start.
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count <= 0:
        return
    begin, end = 0, start + count
    if last_visible_ptr is not None:
        tokens = tl.arange(0, FORM.block_m) // FORM.group
        last_visible = tl.load(last_visible_ptr + q_start + tokens, mask=tokens < count, other=0)
        end = tl.max(last_visible, axis=0) + 1
    seen_by_all = (start + 1) // FORM.block_n * FORM.block_n
    if FORM.window > 0:
        begin = tl.maximum(start - FORM.window + 1, 0) // FORM.block_n * FORM.block_n
        seen_by_all = begin  # windows are masked throughout
    if FORM.is_cut:  # the compiler infers from products with BLOCK_N that places in a block lie in a row
        segments = tl.cdiv(end - begin, segment_len)
        if segment >= segments:
            return
        begin += segment * segment_len
        end = tl.minimum(begin + segment_len, end)
        seen_by_all = (
            tl.minimum(tl.maximum(seen_by_all // FORM.block_n, begin // FORM.block_n), end // FORM.block_n)
            * FORM.block_n
        )

    lanes = tl.arange(0, FORM.block_m)
    dims = tl.arange(0, FORM.block_d)
    q_positions = start + lanes // FORM.group
    last_visible = q_positions if last_visible_ptr is None else tl.maximum(last_visible, q_positions)
    heads = kv_head * FORM.group + lanes % FORM.group
    whole = (lanes < count * FORM.group)[:, None] & (dims < FORM.head_dim)[None, :]
    q_tokens = (q_start + lanes // FORM.group).to(tl.int64)
    q = tl.load(q_ptr + (q_tokens * q_stride + heads * FORM.head_dim)[:, None] + dims[None, :], mask=whole, other=0.0)
    if FORM.scales != "none":
        q = prepare_q(q, scales_ptr, kv_head, scale_log2, tl.constexpr(FORM.scales))
        scale_log2 = 1.0
    m = tl.full([FORM.block_m], -1e30, tl.float32)
    total = first_total(last_visible, FORM)
    acc = tl.full([FORM.block_m, FORM.block_d], 0, tl.float32)

    k_ptr = kv_ptr + kv_head.to(tl.int64) * head_stride
    token_scales_ptr = token_scales(scales_ptr, kv_head, head_stride, FORM.head_dim, tl.constexpr(FORM.scales))
    if FORM.first_key > 0 and FORM.window == 0:  # no token sees all of the first tile
        rest = tl.minimum(begin + FORM.block_n, seen_by_all)
        m, total, acc = attend_range(
            q, q_positions, last_visible, k_ptr, kv_stride, token_scales_ptr, table_ptr, begin, rest, m, total, acc,
            scale_log2, FORM, True,
        )  # fmt: skip
        begin = rest
    m, total, acc = attend_range(
        q, q_positions, last_visible, k_ptr, kv_stride, token_scales_ptr, table_ptr, begin, seen_by_all, m, total, acc,
        scale_log2, FORM, False,
    )  # fmt: skip
    m, total, acc = attend_range(
        q, q_positions, last_visible, k_ptr, kv_stride, token_scales_ptr, table_ptr, seen_by_all, end, m, total, acc,
        scale_log2, FORM, True,
    )  # fmt: skip
    if FORM.is_cut:  # noqa: SIM102  # a constant, without which the names below are unknown
        if segments > 1:
            place += kv_head * num_places
            used = lanes < count * FORM.group
            store_segment(
                acc_ptr, sums_ptr, place, m, total, acc, lanes, dims, used, whole, FORM.block_m, FORM.head_dim
            )
            place -= segment  # the tile's first segment's place
            if not arrives_last(counters_ptr + place, segments):
                return
            if FORM.merged_dims:
                _store_merged(
                    acc_ptr, sums_ptr, place, segments, count, sinks_ptr, scales_ptr, out_ptr, kv_head, q_tokens, heads,
                    whole, FORM,
                )  # fmt: skip
                return
            m, total, acc = merge_segments(
                acc_ptr, sums_ptr, place, segments, 1, count * FORM.group, FORM.block_m, FORM.head_dim, FORM.block_d,
                FORM.merge, -1e30,
            )  # fmt: skip
    total = add_sinks(
        m, total, load_sinks(sinks_ptr, kv_head, count, FORM.group, FORM.block_m), tl.constexpr(FORM.scales)
    )
    total = finish_total(total, scales_ptr, kv_head, FORM.num_kv_heads, tl.constexpr(FORM.scales))
    out_at = out_ptr + (q_tokens * (FORM.num_kv_heads * FORM.group) + heads)[:, None] * FORM.head_dim + dims[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=whole)


@jit
def _store_merged(
    acc_ptr, sums_ptr, place, segments, count, sinks_ptr, scales_ptr, out_ptr, kv_head, q_tokens, heads, whole,
    FORM: tl.constexpr,
):  # fmt: skip
    """Merge a tile's segments and store its output, some dimensions at a time: large tiles exceed the registers."""
    lanes, num_used = tl.arange(0, FORM.block_m), count * FORM.group
    used = lanes < num_used
    highest = tl.full([FORM.block_m], -1e30, tl.float32)
    sums_at = sums_ptr + place * (2 * FORM.block_m) + lanes
    for i in range(segments):
        other = tl.load(sums_at + i * (2 * FORM.block_m), mask=used, other=-1e30, cache_modifier=".cg")
        highest = tl.maximum(highest, other)
    total = tl.full([FORM.block_m], 0, tl.float32)
    for i in range(segments):
        at = sums_at + i * (2 * FORM.block_m)
        other = tl.load(at, mask=used, other=-1e30, cache_modifier=".cg")
        sums = tl.load(at + FORM.block_m, mask=used, other=0.0, cache_modifier=".cg")
        total = tl.fma(sums, tl.exp2(other - highest), total)
    total = add_sinks(
        highest, total, load_sinks(sinks_ptr, kv_head, count, FORM.group, FORM.block_m), tl.constexpr(FORM.scales)
    )
    total = finish_total(total, scales_ptr, kv_head, FORM.num_kv_heads, tl.constexpr(FORM.scales))
    out_at = out_ptr + (q_tokens * (FORM.num_kv_heads * FORM.group) + heads)[:, None] * FORM.head_dim
    acc_at = acc_ptr + place * (FORM.block_m * FORM.head_dim) + lanes[:, None] * FORM.head_dim
    for first in range(0, FORM.block_d, FORM.merged_dims):
        dims = first + tl.arange(0, FORM.merged_dims)[None, :]
        there = used[:, None] & (dims < FORM.head_dim)
        acc = tl.full([FORM.block_m, FORM.merged_dims], 0, tl.float32)
        for i in range(segments):
            other = tl.load(sums_at + i * (2 * FORM.block_m), mask=used, other=-1e30, cache_modifier=".cg")
            part = tl.load(
                acc_at + i * (FORM.block_m * FORM.head_dim) + dims, mask=there, other=0.0, cache_modifier=".cg"
            )
            acc = tl.fma(part, tl.broadcast_to(tl.exp2(other - highest)[:, None], acc.shape), acc)
        tl.store(out_at + dims, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=there)


def prefill_attention(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim], heads contiguous, tokens at any stride
    kv: torch.Tensor,  # [2, num_kv_heads, num_blocks, block_size, head_dim] contiguous
    rows: PagedRows,
    form: AttentionForm,
    scales: torch.Tensor | None = None,  # a quantized cache's scales (stored_kv.py)
    *,
    deterministic: bool = False,
    out: torch.Tensor | None = None,  # [num_tokens, num_heads * head_dim] contiguous
) -> torch.Tensor:
    """`paged_attention_torch` for rows with any number of tokens."""
    if deterministic:
        return decode_attention(q, kv, rows, form, scales, deterministic=True, out=out)
    (num_tokens, num_heads, head_dim), (scale, window, soft_cap, sinks, whole_images, first_key) = q.shape, form
    num_kv_heads, block_size = kv.shape[1], kv.shape[3]
    if out is None:
        out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    group = num_heads // num_kv_heads
    block_d = next_power_of_2(head_dim)
    short = min(rows.num_tokens, rows.max_len) <= 1024
    block_m, block_n, options = _tile(block_d, q.dtype, short, scaling(scales))
    block_m = max(block_m, next_power_of_2(group))
    tile_tokens = block_m // group
    capacity = (1 if block_d > 128 and block_m > 64 else 2) * num_sms(q.device)  # programs that run at a time
    tiles, pieces = rows.num_tokens // tile_tokens, 1  # tiles: about, since rows fill their last one in part
    # A quantized cache was not measured. A tile's walk is not known where an image's tokens see each other.
    last_visible = rows.last_visible if whole_images else None
    is_long = not 0 < window < _LEAST_WINDOW
    if is_long and block_d <= 256 and scales is None and last_visible is None:
        pieces = _pieces(num_kv_heads * max(tiles, rows.num_rows), capacity)
    places = (tiles + rows.num_rows) * pieces
    partial = num_kv_heads * places * block_m if pieces > 1 else 0
    pdl = use_pdl(q)
    # One grid dimension: the others hold no more than 65,535 places each.
    _prefill_attention_kernel[(num_kv_heads * places,)](
        q, kv, kv if scales is None else scales, sinks, last_visible, out, rows.slots, rows.starts, rows.q_starts,
        rows.tables,
        torch.empty(partial * head_dim, dtype=torch.float32, device=q.device),
        torch.empty(partial * 2, dtype=torch.float32, device=q.device), arrival_counters(q.device),
        q.stride(0), kv.stride(0), kv.stride(1), rows.tables.stride(0), rows.num_rows, pieces, scale * LOG2_E,
        FORM=PrefillForm(
            block_size=block_size, head_dim=head_dim, num_kv_heads=num_kv_heads, group=group, tile_tokens=tile_tokens,
            num_rows=rows_searched(rows.num_rows), is_cut=pieces > 1, least_segment=_LEAST_SEGMENT, window=window,
            first_key=first_key, soft_cap=soft_cap, scales=scaling(scales), block_m=block_m, block_n=block_n,
            block_d=block_d, merge=max(1, _MERGED_ELEMENTS // (block_m * block_d)),
            merged_dims=_MERGED_DIMS if block_m * block_d > _MERGED_ELEMENTS else 0, pdl=pdl,
        ),
        **options, **{"launch_pdl": True} if pdl else {},
    )  # fmt: skip
    return out


def _pieces(tiles: int, capacity: int) -> int:
    """Segments of a long walk for the shortest time, if `capacity` programs run at a time; 1 if cuts gain little."""
    counts = range(1, max(2, min(_MOST_PIECES, _MOST_WAVES * capacity // tiles) + 1))
    waves = {count: -(-tiles * count // capacity) / count for count in counts}
    best = min(waves, key=lambda count: (round(waves[count], 2), count))
    return best if waves[best] < _LEAST_GAIN * waves[1] else 1


def attention_triton(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: PagedBatch,
    form: AttentionForm,
    scales: torch.Tensor | None = None,
    *,
    deterministic: bool,
) -> torch.Tensor:
    """`attention_torch`. Rows of one token, and draft tokens in a graph, use decode attention.

    Other short rows do not, because each length would compile the kernel again."""
    out = q.new_empty(len(q), q.shape[1] * q.shape[2])
    for rows in plan.parts:
        attend = decode_attention if rows.max_count == 1 or rows.prefix_ready else prefill_attention
        attend(q, kv, rows, form, scales, deterministic=deterministic, out=out)
    return out


def _tile(block_d: int, dtype: torch.dtype, short: bool, scales: str) -> tuple[int, int, dict[str, int]]:
    """(rows of q, positions, launch options), as measured on an H200; `short` if either is few.

    Two programs on an SM take turns at the tensor cores. That needs a register limit, which costs a few spills outside
    of the loops."""
    if dtype == torch.float32:  # no matrix instruction multiplies fp32: small tiles, for exactness rather than speed
        return 32, 32, {"num_warps": 4, "num_stages": 1}
    if block_d > 256:  # larger tiles spill, as compiled
        if scales == "none":
            return 64, 16, {"num_warps": 8, "num_stages": 3}
        return 32, 32, {"num_warps": 8, "num_stages": 2}
    if block_d > 128 and short and scales != "none":  # more tiles, since they are not cut
        return 64, 32, {"num_warps": 4, "num_stages": 3}
    if block_d > 128:
        return 128, 64, {"num_warps": 8, "num_stages": 2}
    if block_d == 128 and scales == "token":
        return 64, 128, {"num_warps": 4, "num_stages": 2}
    if block_d == 128 and scales == "head" and not short:
        return 128, 128, {"num_warps": 8, "num_stages": 2}
    if block_d == 128 and short:
        return 64, 64, {"num_warps": 4, "num_stages": 3}
    return 128, 64, {"num_warps": 8, "num_stages": 3, "maxnreg": 128}
