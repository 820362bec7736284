"""Segments of several tiles, found once per step for all layers (latent_attention.py).

A captured launch does not know its rows' lengths. So a kernel finds each program's segment before the first layer's
launch, and stores it. Long rows get more segments than others (segments.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.attention.paged_attention import PagedRows, rows_searched
from runtime.kernels.attention.segments import find_segment
from runtime.kernels.triton_language import ROW_ARRAYS, constexpr, jit, tl

_MOST = constexpr(64)  # a tile has more segments only if they are long
_NUM_FIELDS = 8  # numbers per place
_FIELDS = constexpr(_NUM_FIELDS)


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
    """Store one place's segment for `load_segment`. Places without one are the last, but for tiles that see fewer
    positions than their row's last token."""
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = tl.program_id(0)
    row, row_tile, segment, segment_len = find_segment(
        q_starts_ptr, starts_ptr, place, num_rows, num_slots, 1, FORM, False, _MOST
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
    """(the tile's first token in q, its number of tokens, its first token's position, the row's slot, the segment's
    number, the tile's segments, the segment's first position, its end). A place without a segment has no tokens."""
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
