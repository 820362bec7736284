"""Cuts a launch's tiles into segments for different programs, and merges their results.

Rows differ in length: one conversation with 70,000 tokens may share a step with chats. So the longest rows are cut into
more segments than the others, and short ones are not cut. A captured launch does not know its rows. So each program
finds its segment itself, or a kernel finds all of them once a step (`find_segments`).

A tile's last program merges its segments in their order. Arrival counters return to zero, so a captured launch can be
replayed. Found segments are merged by another launch."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from runtime.kernels.attention.paged_attention import PagedRows, rows_searched
from runtime.kernels.triton_language import INTERPRETED, ROW_ARRAYS, constexpr, jit, tl

MOST_PLACES = 1 << 16  # segments in a launch
NUM_COUNTERS = constexpr(MOST_PLACES)  # counters for segments; the groups' counters follow
SEGMENTS = constexpr(16)  # segments that are merged at once. A tile has more only if each has _LEAST positions
GROUP = constexpr(8)  # segments in a group of such a tile
_LEAST = constexpr(128)  # positions
_NUM_FIELDS = 8  # numbers per stored segment
_FIELDS = constexpr(_NUM_FIELDS)
_MOST_STORED = constexpr(64)  # a tile's stored segments; more only if each has _LEAST positions


@jit
def find_segment(
    q_starts_ptr, starts_ptr, place, num_rows, num_slots, pieces, FORM: tl.constexpr, HAS_PIECES: tl.constexpr,
    MOST: tl.constexpr = SEGMENTS,
):  # fmt: skip
    """(row, its tile, the tile's segment, positions per segment) for the place-th program. A program
    that is not needed has its tile beyond the row's last.

    A tile counts with the walk of its row's last token. With HAS_PIECES the longest walk has `pieces` segments.

    Otherwise `num_slots` programs run at a time. T tiles have a sum of walks W. Then segments of
    ceil(W / (P - T + 1)) positions are at most P: each tile wastes less than one. P fills the last wave that T tiles
    need. P // T segments per tile are at most P, too, and shorter for equal walks. If one walk outweighs the others,
    that wave takes much longer than W / num_slots. This is then the segments' length, and they are at most
    T + num_slots."""
    rows = tl.arange(0, FORM.num_rows)
    is_row = rows < num_rows
    starts = tl.load(starts_ptr + rows, mask=is_row, other=0)
    q_starts = tl.load(q_starts_ptr + rows, mask=is_row, other=0)
    counts = tl.load(q_starts_ptr + 1 + rows, mask=is_row, other=0) - q_starts
    tiles, walks = tl.cdiv(counts, FORM.tile_tokens), _walk(starts + counts, FORM)
    longest = tl.max(tl.where(counts > 0, walks, 1))
    if HAS_PIECES:
        most = tl.cdiv(longest, pieces)
    else:
        both = tl.sum((tiles.to(tl.int64) << 40) + tiles.to(tl.int64) * walks)  # two sums, for one meeting of threads
        num_tiles, work = tl.maximum((both >> 40).to(tl.int32), 1), both & ((1 << 40) - 1)
        filled = tl.cdiv(num_tiles, num_slots) * num_slots
        most = tl.minimum(tl.cdiv(work, filled - num_tiles + 1), tl.cdiv(longest, filled // num_tiles))
        even = tl.cdiv(work, num_slots)
        most = tl.where(most > 2 * even, even, most).to(tl.int32)
    most = segment_length(most, longest, FORM, MOST)
    ends = tl.cumsum(tiles * tl.cdiv(walks, most))
    # The last row that begins at this place or before, and where: two at once.
    before = (ends <= place) & (rows < num_rows - 1)
    both = tl.max(tl.where(before, ((rows + 1).to(tl.int64) << 32) + ends, 0))
    row, first = (both >> 32).to(tl.int32), (both & 0xFFFFFFFF).to(tl.int32)
    length = tl.load(starts_ptr + row) + tl.load(q_starts_ptr + row + 1) - tl.load(q_starts_ptr + row)
    segments = tl.maximum(tl.cdiv(_walk(length, FORM), most), 1)
    segment_len = tl.cdiv(tl.cdiv(_walk(length, FORM), segments), FORM.block_n) * FORM.block_n
    return row, (place - first) // segments, (place - first) % segments, segment_len


@jit
def segment_length(length, longest, FORM: tl.constexpr, MOST: tl.constexpr = SEGMENTS):
    """Positions for a segment with at least `length` of them, if the longest walk is cut alike.

    A tile has more than MOST segments only if each has _LEAST positions. Segments are whole tiles of positions: one
    that two segments share would count twice."""
    least = tl.maximum(tl.minimum(tl.cdiv(longest, MOST), _LEAST), FORM.least_segment)
    return tl.cdiv(tl.maximum(length, least), FORM.block_n) * FORM.block_n


@jit
def _walk(length, FORM: tl.constexpr):
    """An upper bound for the positions that the last tile walks over in a row with this length."""
    if FORM.window > 0:
        length = tl.minimum(length, FORM.window + FORM.tile_tokens + FORM.block_n)
    return length


class SegmentForm(NamedTuple):
    """Constants of `_find_segments_kernel`."""

    tile_tokens: int
    num_rows: int  # power of two, at least num_rows
    block_n: int
    least_segment: int  # positions
    pdl: bool
    window: int = 0


@jit(do_not_specialize=["num_rows", "num_slots"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _find_segments_kernel(
    found_ptr,  # [places, _FIELDS] int32
    slots_ptr,
    starts_ptr,
    q_starts_ptr,
    num_rows,
    num_slots,  # programs per head tile that run at a time
    FORM: tl.constexpr,  # `SegmentForm`
):
    """Store one place's segment for `load_segment`. Places without one are the last ones. Only a tile that sees fewer
    positions than its row's last token has some, too."""
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.program_id(0)
    row, row_tile, segment, segment_len = find_segment(
        q_starts_ptr, starts_ptr, place, num_rows, num_slots, 1, FORM, False, _MOST_STORED
    )
    segment_len = tl.maximum(segment_len, FORM.block_n)  # an empty row's is 0
    first = row_tile * FORM.tile_tokens
    q_start, start = tl.load(q_starts_ptr + row) + first, tl.load(starts_ptr + row) + first
    count = tl.minimum(tl.load(q_starts_ptr + row + 1) - q_start, FORM.tile_tokens)
    length = start + count
    begin = segment * segment_len
    at = found_ptr + place * _FIELDS
    tl.store(at, q_start)
    tl.store(at + 1, tl.where(begin < length, tl.maximum(count, 0), 0))
    tl.store(at + 2, start)
    tl.store(at + 3, tl.load(slots_ptr + row))
    tl.store(at + 4, segment)
    tl.store(at + 5, tl.cdiv(length, segment_len))
    tl.store(at + 6, begin)
    tl.store(at + 7, tl.minimum(begin + segment_len, length))


@jit
def load_segment(found_ptr, place):
    """(the tile's first token in q, its number of tokens, its first token's position, its row's slot).

    Then (number in the tile, the tile's segments, first position, end). A place without a segment has 0 tokens."""
    at = found_ptr + place * _FIELDS
    return (
        tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5),
        tl.load(at + 6), tl.load(at + 7),
    )  # fmt: skip


def find_segments(
    rows: PagedRows, places: int, num_slots: int, tile_tokens: int, block_n: int, pdl: bool
) -> tuple[torch.Tensor, bool]:
    """(segments [places, _FIELDS], whether this call has found them). All layers of a step read the same ones.

    A captured graph finds its own, because its rows change between replays."""
    key = places, num_slots, tile_tokens, block_n, _is_captured(rows.starts)
    if key in rows.segments:
        return rows.segments[key], False
    found = torch.empty((places, _NUM_FIELDS), dtype=torch.int32, device=rows.starts.device)
    form = SegmentForm(tile_tokens, rows_searched(rows.num_rows), block_n, block_n, pdl)
    _find_segments_kernel[(places,)](
        found, rows.slots, rows.starts, rows.q_starts, rows.num_rows, num_slots, form, num_warps=1,
        **{"launch_pdl": True} if pdl else {},
    )  # fmt: skip
    rows.segments[key] = found
    return found, True


def _is_captured(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


@jit
def store_segment(
    acc_ptr, sums_ptr, place, m, total, acc, lanes, dims, used, whole, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Store a segment's result for the program that merges."""
    sums_at = sums_ptr + place * (2 * ROWS) + lanes
    tl.store(sums_at, m, mask=used)
    tl.store(sums_at + ROWS, total, mask=used)
    tl.store(acc_ptr + place * (ROWS * HEAD_DIM) + lanes[:, None] * HEAD_DIM + dims[None, :], acc, mask=whole)


@jit
def arrives_last(counter, num_programs):
    """True in the last of `num_programs` programs, which sees the others' stores. Clears the counter."""
    tl.debug_barrier()  # this program's stores come before its arrival
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_programs - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@jit
def merge_segments(
    acc_ptr, sums_ptr, place, segments, stride, num_used, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, MERGE: tl.constexpr, LOWEST: tl.constexpr,
):  # fmt: skip
    """(highest score, weight sum, weighted value sum) over segments from `place` on, `stride` places apart, in order,
    MERGE at a time."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    m = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    sums_at = sums_ptr + place * (2 * ROWS) + rows
    acc_at = acc_ptr + place * (ROWS * HEAD_DIM) + rows[:, None] * HEAD_DIM + dims[None, :]
    for first in range(0, segments, MERGE):
        for i in tl.static_range(MERGE):  # their loads are in flight together
            here = rows < tl.where(first + i < segments, num_used, 0)
            other_m = tl.load(sums_at + i * stride * (2 * ROWS), mask=here, other=LOWEST, cache_modifier=".cg")
            other_total = tl.load(sums_at + i * stride * (2 * ROWS) + ROWS, mask=here, other=0.0, cache_modifier=".cg")
            there = here[:, None] & (dims < HEAD_DIM)[None, :]
            other_acc = tl.load(acc_at + i * stride * (ROWS * HEAD_DIM), mask=there, other=0.0, cache_modifier=".cg")
            m, total, acc = merge(m, total, acc, other_m, other_total, other_acc)
        sums_at += MERGE * stride * 2 * ROWS
        acc_at += MERGE * stride * ROWS * HEAD_DIM
    return m, total, acc


@jit
def merge_group(acc_ptr, sums_ptr, place, segments, num_used, FORM: tl.constexpr):
    """Merge segments, and store their result in place of the first one's."""
    m, total, acc = merge_segments(
        acc_ptr, sums_ptr, place, segments, 1, num_used, FORM.rows, FORM.head_dim, FORM.block_d, FORM.merge, FORM.lowest
    )
    rows, dims = tl.arange(0, FORM.rows), tl.arange(0, FORM.block_d)
    used = rows < num_used
    whole = used[:, None] & (dims < FORM.head_dim)[None, :]
    store_segment(acc_ptr, sums_ptr, place, m, total, acc, rows, dims, used, whole, FORM.rows, FORM.head_dim)


@jit
def merge(m, total, acc, other_m, other_total, other_acc):
    """Merge results over different positions; explicit fma, so that it rounds alike wherever it is inlined."""
    top = tl.maximum(m, other_m)
    weight = tl.exp2(m - top)
    other_weight = tl.exp2(other_m - top)
    total = tl.fma(total, weight, other_total * other_weight)
    acc = tl.fma(acc, tl.broadcast_to(weight[:, None], acc.shape), other_acc * other_weight[:, None])
    return top, total, acc


@cache
def arrival_counters(device: torch.device) -> torch.Tensor:
    """Arrival counters for segments and then for groups, zero between launches."""
    return torch.zeros(2 * MOST_PLACES, dtype=torch.int32, device=device)


@cache
def num_sms(device: torch.device) -> int:
    return 4 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
