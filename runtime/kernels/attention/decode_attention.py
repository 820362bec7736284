"""Attention for rows with few tokens (decode, verification) over the paged cache, each row's positions split.

Split-KV ("flash decoding"): different programs attend to segments of a row's positions, so that few rows still fill the
GPU. A kv head's query heads, and a row's tokens, share one tile, so keys and values are read once. A tile's last
program merges its segments in their order (segments.py).

By default, all programs get about equal segments, whatever the rows' lengths. In deterministic mode, segments lie at
fixed positions and tiles have one shape. A token's bits then depend only on its own q, k and v.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.attention.paged_attention import (
    LOG2_E,
    AttentionForm,
    PagedRows,
    add_sinks,
    attend_range,
    attend_tile,
    find_places,
    find_row,
    first_seen,
    first_total,
    is_inside,
    load_scales,
    load_sinks,
    load_tile,
    rows_searched,
    tile_pointers,
    token_scales,
)
from runtime.kernels.attention.segments import (
    GROUP,
    MOST_PLACES,
    NUM_COUNTERS,
    SEGMENTS,
    arrival_counters,
    arrives_last,
    find_segment,
    merge,
    merge_group,
    merge_segments,
    num_sms,
    segment_length,
    store_segment,
)
from runtime.kernels.attention.stored_kv import finish_total, prepare_q, scaling
from runtime.kernels.triton_language import ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl

_TILE_ROWS = 16  # the smallest matrix instruction's rows; every tile's in deterministic mode
_FIXED_SEGMENT = 512  # positions, deterministic mode; otherwise a tile at least
_MAX_SPLITS = 32  # a tile's programs in deterministic mode
_FEW_ROWS = 32  # fewer rows are searched in less time
_MERGED_ELEMENTS = 8192  # fp32 elements in partial results that are loaded at a time


class DecodeForm(NamedTuple):
    """Constants of `_decode_attention_kernel`."""

    block_size: int
    head_dim: int
    group: int  # query heads per kv head
    tile_tokens: int  # most tokens of a row in one tile
    num_rows: int  # power of two, at least num_rows; 0 for one row, and if a row is one tile with `fixed`
    least_segment: int  # positions per segment with `fixed`, else at least that many
    fixed: bool  # segments lie at multiples of `least_segment`
    window: int
    first_key: int
    soft_cap: float
    scales: str  # none | head | token
    rows: int  # power of two, at least tile_tokens * group
    block_m: int  # `rows` or what a matrix instruction needs
    block_n: int
    block_d: int
    merge: int  # segments loaded at a time
    eager: bool  # a segment's first tile is requested before the wait: with prefix_ready, without `fixed`
    lowest: float  # lower than all scores, yet finite
    pdl: bool


@jit(do_not_specialize=["num_rows", "num_segments", "num_slots"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _decode_attention_kernel(
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM], tokens q_stride apart
    kv_ptr,  # [2, num_kv_heads, num_blocks, BLOCK_SIZE, HEAD_DIM] contiguous
    scales_ptr,  # a quantized cache's scales (stored_kv.py), contiguous; not used without SCALES
    sinks_ptr,  # [num_heads] fp32, or None
    last_visible_ptr,  # [num_tokens] the last position that each token sees, or None for its own; with `fixed`
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM] contiguous
    slots_ptr,
    starts_ptr,
    q_starts_ptr,
    tables_ptr,
    acc_ptr,  # [places, ROWS, HEAD_DIM] fp32, each segment's result; places by tile or else first by kv head
    sums_ptr,  # [places, 2, ROWS] fp32, its highest score and its sum of weights
    counters_ptr,  # int32 zeros
    q_stride,
    kv_stride,  # elements between k and v
    head_stride,  # elements between kv heads
    table_stride,
    num_rows,
    num_segments,  # most per tile with `fixed`
    num_slots,  # programs per kv head that run at a time; not used with `fixed`
    scale_log2,
    FORM: tl.constexpr,  # `DecodeForm`
):
    if FORM.fixed:
        tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        num_kv_heads, num_splits = tl.num_programs(1), tl.num_programs(2)
    else:  # idle programs are the last ones, so that all multiprocessors have equally many others
        kv_head, tile = tl.program_id(0), tl.program_id(1)
        num_kv_heads, num_splits = tl.num_programs(0), 1
    row, row_tile = 0, 0
    if FORM.num_rows and FORM.fixed:
        row, row_tile = find_row(q_starts_ptr, tile, num_rows, FORM.tile_tokens, FORM.num_rows)
    elif FORM.num_rows:
        row, row_tile, split, segment_len = find_segment(
            q_starts_ptr, starts_ptr, tile, num_rows, num_slots, 0, FORM, False
        )
    elif FORM.fixed:
        row = tile
    else:
        split = tile
    q_start = tl.load(q_starts_ptr + row) + row_tile * FORM.tile_tokens
    count = tl.minimum(tl.load(q_starts_ptr + row + 1) - q_start, FORM.tile_tokens)
    start = tl.load(starts_ptr + row) + row_tile * FORM.tile_tokens  # position of the tile's first token
    table_ptr = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
    k_ptr = kv_ptr + kv_head.to(tl.int64) * head_stride
    token_scales_ptr = token_scales(scales_ptr, kv_head, head_stride, FORM.head_dim, tl.constexpr(FORM.scales))
    length = start + count
    if last_visible_ptr is not None:
        tokens = tl.arange(0, FORM.block_m) // FORM.group
        last_visible = tl.load(last_visible_ptr + q_start + tokens, mask=tokens < count, other=0)
        length = tl.max(last_visible, axis=0) + 1
    lowest = 0
    if FORM.window > 0:
        lowest = tl.maximum(start - FORM.window + 1, 0) // FORM.block_n * FORM.block_n
    origin = lowest
    if FORM.fixed:
        origin = lowest // FORM.least_segment * FORM.least_segment
        segment_len = FORM.least_segment
    elif not FORM.num_rows:
        segment_len = segment_length(tl.cdiv(length - origin, num_slots), length - origin, FORM)
    segments = tl.cdiv(length - origin, segment_len)
    is_idle = (count <= 0) | (split >= segments)
    if not FORM.fixed:  # noqa: SIM102  # idle programs make way, except one: a launch must not end before its wait
        if is_idle & (tile + kv_head > 0):
            return
    begin = origin + split * segment_len
    offsets = tl.arange(0, FORM.block_n)
    if FORM.eager:  # requests the first tile, but for what this step's tokens put there
        places = find_places(table_ptr, begin + offsets, begin + offsets < length, FORM.block_size)
        pointers = tile_pointers(k_ptr, places, FORM.head_dim, FORM.block_d)
        old = is_inside(begin + offsets, first_seen(start, FORM), start, FORM)
        k = load_tile(pointers, old, FORM.head_dim, FORM.block_d)
        v = load_tile(pointers + kv_stride, old, FORM.head_dim, FORM.block_d)
        k_scales, v_scales = None, None
        if FORM.scales == "token":
            k_scales, v_scales = load_scales(token_scales_ptr + places, old)
    sinks = load_sinks(sinks_ptr, kv_head, count, FORM.group, FORM.block_m)
    # The previous launch (RoPE and the store of k and v) waited before it let this one start. Rows, tables and, with
    # prefix_ready, all keys before the rows were complete by then.
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if is_idle:
        return

    lanes = tl.arange(0, FORM.block_m)
    dims = tl.arange(0, FORM.block_d)
    q_positions = start + lanes // FORM.group
    last_visible = q_positions if last_visible_ptr is None else tl.maximum(last_visible, q_positions)
    heads = kv_head * FORM.group + lanes % FORM.group
    num_heads = num_kv_heads * FORM.group
    used = lanes < count * FORM.group
    whole = used[:, None] & (dims < FORM.head_dim)[None, :]
    q_tokens = (q_start + lanes // FORM.group).to(tl.int64)
    q_at = q_ptr + (q_tokens * q_stride + heads * FORM.head_dim)[:, None] + dims[None, :]
    q = tl.load(q_at, mask=whole, other=0.0)
    if FORM.scales != "none":
        q = prepare_q(q, scales_ptr, kv_head, scale_log2, tl.constexpr(FORM.scales))
        scale_log2 = 1.0

    if FORM.fixed:
        alone = (num_splits == 1) | (segments == 1)
        counter = tile * num_kv_heads + kv_head
        place = counter.to(tl.int64) * num_segments
        own_place = place + split
    else:
        alone = segments == 1
        own_place = kv_head * tl.num_programs(1) + tile
        place = own_place - split
    m = tl.full([FORM.block_m], FORM.lowest, tl.float32)
    total = first_total(last_visible, FORM)
    acc = tl.full([FORM.block_m, FORM.block_d], 0, tl.float32)
    if FORM.fixed:
        m, total, acc = attend_range(
            q, q_positions, last_visible, k_ptr, kv_stride, token_scales_ptr, table_ptr, tl.maximum(begin, lowest),
            tl.minimum(begin + FORM.least_segment, length), m, total, acc, scale_log2, FORM, True,
        )  # fmt: skip
        if alone:
            acc += 0.0  # merging with nothing does so: no negative zeros
        else:
            store_segment(
                acc_ptr, sums_ptr, own_place, m, total, acc, lanes, dims, used, whole, FORM.rows, FORM.head_dim
            )
        for segment in range(split + num_splits, segments, num_splits):
            segment_m, segment_total, segment_acc = attend_range(
                q, q_positions, last_visible, k_ptr, kv_stride, token_scales_ptr, table_ptr,
                origin + segment * FORM.least_segment, tl.minimum(origin + (segment + 1) * FORM.least_segment, length),
                tl.full([FORM.block_m], FORM.lowest, tl.float32), tl.full([FORM.block_m], 0, tl.float32),
                tl.full([FORM.block_m, FORM.block_d], 0, tl.float32), scale_log2, FORM, True,
            )  # fmt: skip
            if alone:
                m, total, acc = merge(m, total, acc, segment_m, segment_total, segment_acc)
            else:
                store_segment(
                    acc_ptr, sums_ptr, place + segment, segment_m, segment_total, segment_acc, lanes, dims, used, whole,
                    FORM.rows, FORM.head_dim,
                )  # fmt: skip
    else:
        end = tl.minimum(begin + segment_len, length)
        if FORM.eager:
            positions = begin + offsets
            new = (positions >= start) & (positions < end)
            if FORM.first_key > 0:
                new &= positions >= FORM.first_key
            k = tl.where(new[:, None], load_tile(pointers, new, FORM.head_dim, FORM.block_d), k)
            v = tl.where(new[:, None], load_tile(pointers + kv_stride, new, FORM.head_dim, FORM.block_d), v)
            if FORM.scales == "token":
                new_k_scales, new_v_scales = load_scales(token_scales_ptr + places, new)
                k_scales, v_scales = tl.where(new, new_k_scales, k_scales), tl.where(new, new_v_scales, v_scales)
            m, total, acc = attend_tile(
                q, k, v, k_scales, v_scales, positions, q_positions, last_visible, m, total, acc, scale_log2, True, FORM
            )
            begin += FORM.block_n
        m, total, acc = attend_range(
            q, q_positions, last_visible, k_ptr, kv_stride, token_scales_ptr, table_ptr, begin, end, m, total, acc,
            scale_log2, FORM, True,
        )  # fmt: skip
        if not alone:
            store_segment(
                acc_ptr, sums_ptr, own_place, m, total, acc, lanes, dims, used, whole, FORM.rows, FORM.head_dim
            )

    out_dtype: tl.constexpr = out_ptr.dtype.element_ty
    if alone:
        total = add_sinks(m, total, sinks, tl.constexpr(FORM.scales))
        total = finish_total(total, scales_ptr, kv_head, num_kv_heads, tl.constexpr(FORM.scales))
        out_at = out_ptr + (q_tokens * num_heads + heads)[:, None] * FORM.head_dim + dims[None, :]
        tl.store(out_at, (acc / total[:, None]).to(out_dtype), mask=whole)
        return
    num_used = count * FORM.group
    if FORM.fixed:
        if not arrives_last(counters_ptr + counter, tl.minimum(segments, num_splits)):
            return
        m, total, acc = merge_segments(
            acc_ptr, sums_ptr, place, segments, 1, num_used, FORM.rows, FORM.head_dim, FORM.block_d, FORM.merge,
            FORM.lowest,
        )  # fmt: skip
    else:
        counter, num_merged, stride = counters_ptr + place, segments, 1
        if FORM.merge > 1:  # noqa: SIM102  # larger tiles have no registers for it
            if segments > SEGMENTS:  # groups are merged first, by different programs
                group = place + split // GROUP * GROUP
                num_merged = tl.minimum(place + segments - group, GROUP)
                if not arrives_last(counters_ptr + group, num_merged):
                    return
                merge_group(acc_ptr, sums_ptr, group, num_merged, num_used, FORM)
                counter, num_merged, stride = counter + NUM_COUNTERS, tl.cdiv(segments, GROUP), GROUP
        if not arrives_last(counter, num_merged):
            return
        m, total, acc = merge_segments(
            acc_ptr, sums_ptr, place, num_merged, stride, num_used, FORM.rows, FORM.head_dim, FORM.block_d, FORM.merge,
            FORM.lowest,
        )  # fmt: skip
    rows = tl.arange(0, FORM.rows)
    whole = (rows < num_used)[:, None] & (dims < FORM.head_dim)[None, :]
    total = add_sinks(m, total, load_sinks(sinks_ptr, kv_head, count, FORM.group, FORM.rows), tl.constexpr(FORM.scales))
    total = finish_total(total, scales_ptr, kv_head, num_kv_heads, tl.constexpr(FORM.scales))
    q_tokens = (q_start + rows // FORM.group).to(tl.int64)
    heads = kv_head * FORM.group + rows % FORM.group
    out_at = out_ptr + (q_tokens * num_heads + heads)[:, None] * FORM.head_dim + dims[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out_dtype), mask=whole)


def decode_attention(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim], heads contiguous, tokens at any stride
    kv: torch.Tensor,  # [2, num_kv_heads, num_blocks, block_size, head_dim] contiguous
    rows: PagedRows,
    form: AttentionForm,
    scales: torch.Tensor | None = None,  # a quantized cache's scales (stored_kv.py)
    *,
    deterministic: bool = False,
    out: torch.Tensor | None = None,  # [num_tokens, num_heads * head_dim] contiguous
) -> torch.Tensor:
    """`paged_attention_torch` for rows with few tokens, or any number if deterministic; lengths do not shape the
    grid."""
    (num_tokens, num_heads, head_dim), (scale, window, soft_cap, sinks, whole_images, first_key) = q.shape, form
    num_kv_heads, block_size = kv.shape[1], kv.shape[3]
    if out is None:
        out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    group = num_heads // num_kv_heads
    block_d = next_power_of_2(head_dim)
    if deterministic or block_d > 256:
        tile_tokens = max(1, _TILE_ROWS // next_power_of_2(group))
        num_tiles = rows.num_rows if rows.max_count == 1 else rows.num_tokens // tile_tokens + rows.num_rows
    else:
        tile_tokens, num_tiles = next_power_of_2(rows.max_count), rows.num_rows
    tile_rows = next_power_of_2(tile_tokens * group)
    is_small = tile_rows <= _TILE_ROWS and scales is None and q.dtype != torch.float32
    # Programs that an SM runs at a time.
    per_sm = 4 if block_d <= 64 else 3 if block_d == 128 or (block_d == 256 and is_small and not deterministic) else 2
    capacity = per_sm * num_sms(q.device)
    programs, slots = num_tiles * num_kv_heads, max(1, capacity // num_kv_heads)
    places = num_tiles + slots if num_tiles > 1 else slots  # segments per kv head
    deterministic |= num_kv_heads * places > MOST_PLACES
    eager = 2 * programs <= capacity and not deterministic and rows.prefix_ready and num_tiles == rows.num_rows
    block_n, options = _tile(block_d, q.dtype, eager, deterministic, scaling(scales))
    if per_sm == 3 and is_small and (eager or block_d == 256):
        options |= {"maxnreg": 168}  # three programs share an SM's registers
    # Rows of one token end images; only a deterministic step computes long rows here.
    last_visible = rows.last_visible if whole_images and deterministic and rows.max_count > 1 else None
    segments, partial, grid = 0, num_kv_heads * places, (num_kv_heads, places, 1)
    if deterministic:
        longest = rows.max_len  # positions of a tile
        if window and last_visible is None:
            longest = min(longest, window - 1 + tile_tokens + _FIXED_SEGMENT)
        segments = -(-longest // _FIXED_SEGMENT)
        splits = max(1, min(capacity // programs, _MAX_SPLITS, segments))
        grid, partial = (num_tiles, num_kv_heads, splits), programs * segments if splits > 1 else 0
    searched = 0
    if num_tiles > (rows.num_rows if deterministic else 1):
        searched = _FEW_ROWS if rows.num_rows <= _FEW_ROWS else rows_searched(rows.num_rows)
    pdl = use_pdl(q)
    _decode_attention_kernel[grid](
        q, kv, kv if scales is None else scales, sinks, last_visible, out, rows.slots, rows.starts, rows.q_starts,
        rows.tables,
        torch.empty(partial * tile_rows * head_dim, dtype=torch.float32, device=q.device),
        torch.empty(partial * tile_rows * 2, dtype=torch.float32, device=q.device), arrival_counters(q.device),
        q.stride(0), kv.stride(0), kv.stride(1), rows.tables.stride(0), rows.num_rows, segments, slots, scale * LOG2_E,
        FORM=DecodeForm(
            block_size=block_size, head_dim=head_dim, group=group, tile_tokens=tile_tokens,
            num_rows=searched, least_segment=_FIXED_SEGMENT if deterministic else block_n, fixed=deterministic,
            window=window, first_key=first_key, soft_cap=soft_cap, scales=scaling(scales), rows=tile_rows,
            block_m=max(tile_rows, _TILE_ROWS), block_n=block_n, block_d=block_d,
            merge=max(1, min(8, _MERGED_ELEMENTS // (tile_rows * block_d))), eager=eager, lowest=-1e30, pdl=pdl,
        ),
        **options, **{"launch_pdl": True} if pdl else {},
    )  # fmt: skip
    return out


def _tile(
    block_d: int, dtype: torch.dtype, eager: bool, deterministic: bool, scales: str
) -> tuple[int, dict[str, int]]:
    """(positions a tile, launch options), as measured on an H200. For 512-wide heads they fit its registers."""
    if block_d > 256 and dtype != torch.float32:
        return 32, {"num_warps": 8, "num_stages": 3}
    if dtype == torch.float32 or block_d > 128:
        return 32, {"num_warps": 4, "num_stages": 3}
    if block_d == 128 and scales != "none" and not eager and not deterministic:
        return (128, {"num_warps": 2, "num_stages": 4}) if scales == "head" else (64, {"num_warps": 2, "num_stages": 3})
    if block_d == 128 and deterministic:
        return (128, {"num_warps": 4, "num_stages": 2}) if scales == "none" else (64, {"num_warps": 2, "num_stages": 3})
    if block_d == 128:
        return 64, {"num_warps": 4, "num_stages": 3}
    return 64, {"num_warps": 4, "num_stages": 3} if eager else {"num_warps": 2, "num_stages": 5}
