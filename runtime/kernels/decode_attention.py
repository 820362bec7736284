"""Attention of rows of a few tokens (decode, verification) over the paged cache, each row's positions split.

Split-KV ("flash decoding"): a row's positions are cut into segments that different programs attend to, so that few
rows still fill the GPU. All query heads of a kv head, and all tokens of a row, share one tile, so keys and values are
read once. The program that finishes a tile last merges its segments, in their order (the counter it finds that out
with is back at zero afterwards, so that a captured launch can be replayed).

By default the number of segments follows the number of rows, and their length each row's own length; the grid depends
on neither. In deterministic mode segments lie at fixed positions and tiles have one shape, so a token's bits depend on
nothing but its own q, k and v.
"""

from __future__ import annotations

from functools import cache

import torch

from runtime.kernels._triton import INTERPRETED, jit, next_power_of_2, tl, use_pdl
from runtime.kernels.paged_attention import LOG2_E, PagedRows, attend, find_row

_TILE_ROWS = 16  # rows of the smallest matrix instruction; also of every tile in deterministic mode
_FIXED_SEGMENT = 512  # positions, deterministic mode
_MIN_SEGMENT = 64  # positions, otherwise
_MAX_SPLITS = 32
_PROGRAMS_PER_SM = 2  # enough to keep the memory busy
_MERGED_ELEMENTS = 8192  # fp32 elements of partial results that a merge holds at a time


@jit
def _decode_attention_kernel(
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM], tokens q_stride apart
    kv_ptr,  # [2, num_kv_heads, num_blocks, BLOCK_SIZE, HEAD_DIM] contiguous
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM] contiguous
    slots_ptr,
    starts_ptr,
    q_starts_ptr,
    tables_ptr,
    acc_ptr,  # [tiles, num_kv_heads, num_segments, ROWS, HEAD_DIM] fp32, each segment's result
    sums_ptr,  # [tiles, num_kv_heads, num_segments, 2, ROWS] fp32, its highest score and its sum of weights
    counters_ptr,  # [tiles, num_kv_heads] int32 zeros
    q_stride,
    kv_stride,  # elements between k and v
    head_stride,  # elements between kv heads
    table_stride,
    num_rows,
    num_segments,  # at most, of a row
    scale_log2,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a kv head
    TILE_TOKENS: tl.constexpr,  # at most, of a row in one tile
    NUM_ROWS: tl.constexpr,  # power of two, at least num_rows; 0: a row is one tile
    SEGMENT: tl.constexpr,  # positions of a segment if FIXED, else its least number of them
    FIXED: tl.constexpr,  # segments lie at multiples of SEGMENT
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ROWS: tl.constexpr,  # power of two, at least TILE_TOKENS * GROUP
    BLOCK_M: tl.constexpr,  # ROWS or what a matrix instruction needs
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE: tl.constexpr,  # segments merged at a time
    PDL: tl.constexpr,
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads, num_splits = tl.num_programs(1), tl.num_programs(2)
    if NUM_ROWS:
        row, row_tile = find_row(q_starts_ptr, tile, num_rows, TILE_TOKENS, NUM_ROWS)
    else:
        row, row_tile = tile, 0
    q_start = tl.load(q_starts_ptr + row) + row_tile * TILE_TOKENS
    count = tl.minimum(tl.load(q_starts_ptr + row + 1) - q_start, TILE_TOKENS)
    start = tl.load(starts_ptr + row) + row_tile * TILE_TOKENS  # position of the tile's first token
    table_ptr = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
    if PDL:  # rows and tables are older than the launch before this one, hence complete
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count <= 0:
        return
    length = start + count
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(start - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    if FIXED:
        origin = lowest // SEGMENT * SEGMENT
        segment_len = SEGMENT
    else:
        origin = lowest
        segment_len = tl.cdiv(tl.cdiv(length - origin, num_splits), BLOCK_N) * BLOCK_N
        segment_len = tl.maximum(segment_len, SEGMENT)
    count_segments = tl.cdiv(length - origin, segment_len)
    if split >= count_segments:
        return

    head_ptr = kv_ptr + kv_head.to(tl.int64) * head_stride
    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_positions = start + lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    num_heads = num_kv_heads * GROUP
    used = lanes < count * GROUP
    whole = used[:, None] & (dims < HEAD_DIM)[None, :]
    q_tokens = (q_start + lanes // GROUP).to(tl.int64)
    q_at = q_ptr + (q_tokens * q_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
    q = tl.load(q_at, mask=whole, other=0.0)

    # LOWEST is finite, so that a row that sees nothing of a segment needs no care: its weights there are zeros.
    LOWEST: tl.constexpr = -1e30
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    alone = (num_splits == 1) | (count_segments == 1)
    place = (tile * num_kv_heads + kv_head).to(tl.int64) * num_segments
    if FIXED:
        for segment in range(split, count_segments, num_splits):
            begin = tl.maximum(origin + segment * SEGMENT, lowest)
            end = tl.minimum(origin + (segment + 1) * SEGMENT, length)
            segment_m, segment_l, segment_acc = attend(
                q, q_positions, head_ptr, table_ptr, kv_stride, begin, end, scale_log2,
                tl.full([BLOCK_M], LOWEST, tl.float32), tl.zeros([BLOCK_M], tl.float32),
                tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
                BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True, WINDOW, SOFT_CAP,
            )  # fmt: skip
            if alone:
                m, total, acc = _merge(m, total, acc, segment_m, segment_l, segment_acc)
            else:
                sums_at = sums_ptr + (place + segment) * (2 * ROWS) + lanes
                tl.store(sums_at, segment_m, mask=used)
                tl.store(sums_at + ROWS, segment_l, mask=used)
                acc_at = acc_ptr + (place + segment) * (ROWS * HEAD_DIM) + lanes[:, None] * HEAD_DIM + dims[None, :]
                tl.store(acc_at, segment_acc, mask=whole)
    else:
        begin = origin + split * segment_len
        end = tl.minimum(begin + segment_len, length)
        m, total, acc = attend(
            q, q_positions, head_ptr, table_ptr, kv_stride, begin, end, scale_log2, m, total, acc,
            BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True, WINDOW, SOFT_CAP,
        )  # fmt: skip
        if not alone:
            sums_at = sums_ptr + (place + split) * (2 * ROWS) + lanes
            tl.store(sums_at, m, mask=used)
            tl.store(sums_at + ROWS, total, mask=used)
            acc_at = acc_ptr + (place + split) * (ROWS * HEAD_DIM) + lanes[:, None] * HEAD_DIM + dims[None, :]
            tl.store(acc_at, acc, mask=whole)

    out_dtype: tl.constexpr = out_ptr.dtype.element_ty
    if alone:
        out_at = out_ptr + (q_tokens * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_at, (acc / total[:, None]).to(out_dtype), mask=whole)
        return
    counter = counters_ptr + tile * num_kv_heads + kv_head
    tl.debug_barrier()  # all of this program's stores come before its arrival
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    if arrived != tl.minimum(count_segments, num_splits) - 1:
        return
    tl.store(counter, 0)
    rows = tl.arange(0, ROWS)
    m = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    used = rows < count * GROUP
    whole = used[:, None] & (dims < HEAD_DIM)[None, :]
    for first in range(0, count_segments, MERGE):
        segments = first + tl.arange(0, MERGE)
        here = segments < count_segments
        sums_at = sums_ptr + ((place + segments) * (2 * ROWS))[:, None] + rows[None, :]
        ms = tl.load(sums_at, mask=here[:, None] & used[None, :], other=LOWEST, cache_modifier=".cg")
        ls = tl.load(sums_at + ROWS, mask=here[:, None] & used[None, :], other=0.0, cache_modifier=".cg")
        in_segment = rows[:, None] * HEAD_DIM + dims[None, :]
        accs_at = acc_ptr + ((place + segments) * (ROWS * HEAD_DIM))[:, None, None] + in_segment[None, :, :]
        accs = tl.load(accs_at, mask=here[:, None, None] & whole[None, :, :], other=0.0, cache_modifier=".cg")
        top = tl.max(ms, axis=0)
        weights = tl.exp2(ms - top[None, :])
        some_l, some_acc = tl.sum(weights * ls, axis=0), tl.sum(weights[:, :, None] * accs, axis=0)
        m, total, acc = _merge(m, total, acc, top, some_l, some_acc)
    q_tokens = (q_start + rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    out_at = out_ptr + (q_tokens * num_heads + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out_dtype), mask=whole)


@jit
def _merge(m, total, acc, other_m, other_l, other_acc):
    """Two results over different positions as one; explicit fma, so that it rounds the same wherever it is inlined."""
    top = tl.maximum(m, other_m)
    weight = tl.exp2(m - top)
    other_weight = tl.exp2(other_m - top)
    total = tl.fma(total, weight, other_l * other_weight)
    acc = tl.fma(acc, tl.broadcast_to(weight[:, None], acc.shape), other_acc * other_weight[:, None])
    return top, total, acc


def decode_attention(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim], heads contiguous, tokens at any stride
    kv: torch.Tensor,  # [2, num_kv_heads, num_blocks, block_size, head_dim] contiguous
    rows: PagedRows,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    deterministic: bool = False,
    out: torch.Tensor | None = None,  # [num_tokens, num_heads * head_dim] contiguous
) -> torch.Tensor:
    """`paged_attention_torch` for rows of few tokens (deterministic: of any number), in a grid free of lengths."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[1], kv.shape[3]
    if out is None:
        out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    group = num_heads // num_kv_heads
    block_d = next_power_of_2(head_dim)
    block_n, warps, stages = _tile(block_d, q.dtype)
    if deterministic:
        tile_tokens = max(1, _TILE_ROWS // next_power_of_2(group))
        num_tiles = rows.num_rows if rows.max_count == 1 else num_tokens // tile_tokens + rows.num_rows
    else:
        tile_tokens, num_tiles = next_power_of_2(rows.max_count), rows.num_rows
    tile_rows = next_power_of_2(tile_tokens * group)
    programs = num_tiles * num_kv_heads
    splits = max(1, min(_PROGRAMS_PER_SM * _num_sms(q.device) // programs, _MAX_SPLITS))
    segment = _FIXED_SEGMENT if deterministic else _MIN_SEGMENT
    segments = -(-rows.max_len // segment)
    splits = min(splits, segments)
    if not deterministic or splits == 1:
        segments = splits
    partial = programs * segments * tile_rows if splits > 1 else 0
    pdl = use_pdl(q)
    _decode_attention_kernel[(num_tiles, num_kv_heads, splits)](
        q, kv, out, rows.slots, rows.starts, rows.q_starts, rows.tables,
        torch.empty(partial * head_dim, dtype=torch.float32, device=q.device),
        torch.empty(partial * 2, dtype=torch.float32, device=q.device),
        _counters(q.device), q.stride(0), kv.stride(0), kv.stride(1), rows.tables.stride(0), rows.num_rows,
        segments, scale * LOG2_E,
        BLOCK_SIZE=block_size, HEAD_DIM=head_dim, GROUP=group, TILE_TOKENS=tile_tokens,
        NUM_ROWS=next_power_of_2(rows.num_rows) if num_tiles > rows.num_rows else 0,
        SEGMENT=segment, FIXED=deterministic, WINDOW=window, SOFT_CAP=soft_cap,
        ROWS=tile_rows, BLOCK_M=max(tile_rows, _TILE_ROWS), BLOCK_N=block_n, BLOCK_D=block_d,
        MERGE=1 if deterministic else max(1, min(_MAX_SPLITS, _MERGED_ELEMENTS // (tile_rows * block_d))),
        PDL=pdl, num_warps=warps, num_stages=stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


def _tile(block_d: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(positions a tile, warps, pipeline stages)."""
    return 32 if block_d > 128 or dtype == torch.float32 else 64, 4, 3


@cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros between launches; there are splits only while programs per split are fewer than this."""
    return torch.zeros(_PROGRAMS_PER_SM * _num_sms(device), dtype=torch.int32, device=device)


@cache
def _num_sms(device: torch.device) -> int:
    return 4 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
