"""A head's rows on the device: which draft tokens the target accepts, and where the next ones go.

    drafts[slot, position % DRAFT_WIDTH]   the draft token at a position; -1 if the head made none
    places = [ slots and positions of a pass's tokens | slots and positions of the draft tokens after them ], [4, n]

Draft tokens that would lie behind the context go to the null slot, which is the last one, at position 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.base.types import MAX_DRAFT_TOKENS
from runtime.kernels.triton_language import ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl

DRAFT_WIDTH = 1 << MAX_DRAFT_TOKENS.bit_length()  # more than the draft tokens of a round
_LANES = 128
_COLUMNS = 1024


def accept_drafts_torch(
    slots: torch.Tensor,  # [n] int32
    starts: torch.Tensor,  # [n] int32, the position after each row's first token, which is its first sample's
    own_counts: torch.Tensor,  # [n] int32, each row's tokens, of at most row_len
    sample_slots: torch.Tensor,  # [n * row_len] int32, a sample after each token; the null slot if it is not wanted
    firsts: torch.Tensor,  # [n] int32, the index of each row's first token
    tokens: torch.Tensor,  # [num_slots + 1, max_model_len] int32 with the samples, any stride between rows
    drafts: torch.Tensor,  # [num_slots + 1, DRAFT_WIDTH] int32
    places: torch.Tensor,  # [4, n] int32; receives the next draft tokens'
    index: torch.Tensor,  # [n] int32; receives the index of the token before each row's last accepted sample
) -> None:
    """Find each row's last accepted sample: its draft tokens before that sample equal their samples. Rows without a
    wanted sample go to the null slot."""
    n, (null_slot, max_len) = len(slots), (len(tokens) - 1, tokens.shape[1])
    at = torch.arange(len(sample_slots) // n, device=slots.device)
    row, positions = slots.long()[:, None], starts[:, None] + at
    wanted = sample_slots.view(n, -1) != null_slot
    is_equal = drafts[row, positions % DRAFT_WIDTH] == tokens[row, positions.clamp(max=max_len - 1)]
    is_accepted = is_equal & (at < own_counts[:, None] - 1)
    last = torch.where(wanted & ~is_accepted, at, len(at)).amin(1).int()
    has_sample = last < len(at)
    last = last * has_sample
    index.copy_(firsts + last)
    next_position = starts + last + 1
    inside = has_sample & (next_position < max_len)
    places[2], places[3] = torch.where(inside, slots, null_slot), next_position * inside


def keep_drafts_torch(
    token_ids: torch.Tensor,  # [n] int32, -1 where the head's logits are not finite
    places: torch.Tensor,  # [4, n] int32, moved on by one token
    drafts: torch.Tensor,  # [num_slots + 1, DRAFT_WIDTH] int32
    max_len: int,
) -> None:
    """Keep the sampled draft tokens, which the next pass takes."""
    null_slot = len(drafts) - 1
    slots, positions = places[2].clone(), places[3].clone()
    drafts[slots.long(), (positions % DRAFT_WIDTH).long()] = token_ids
    inside = (slots != null_slot) & (positions + 1 < max_len)
    places[0], places[1] = slots, positions
    places[2], places[3] = torch.where(inside, slots, null_slot), (positions + 1) * inside


def keep_block_ends_torch(
    hidden: torch.Tensor,  # [n * row_len, hidden] the combined features of rows with row_len tokens
    slots: torch.Tensor,  # [n] int32
    starts: torch.Tensor,  # [n] int32, the position after each row's first token
    own_counts: torch.Tensor,  # [n] int32
    tables: torch.Tensor,  # [num_slots + 1, max_blocks] int32 block ids times `factor`, any stride between rows
    factor: int,
    block_size: int,
    block_features: torch.Tensor,  # [num_blocks, hidden]; row 0 may hold anything
) -> None:
    """Copy the features of blocks' last tokens, for rows that continue behind these blocks (HeadSpec)."""
    n, row_len = len(slots), len(hidden) // len(slots)
    at = torch.arange(row_len, device=slots.device)
    nexts = starts[:, None] + at
    ends = (nexts % block_size == 0) & (nexts > 0) & (at < own_counts[:, None])
    blocks = tables[slots.long()[:, None], (nexts // block_size - 1).clamp(min=0)] // factor
    block_features[blocks[ends].long()] = hidden.view(n, row_len, -1)[ends]


class AcceptForm(NamedTuple):
    """Constants of `_accept_drafts_kernel`."""

    row_len: int
    lanes: int  # power of two, at least row_len
    width: int  # DRAFT_WIDTH
    pdl: bool


@jit(do_not_specialize=["null_slot", "max_len"], do_not_specialize_on_alignment=[*ROW_ARRAYS, "sample_slots_ptr"])
def _accept_drafts_kernel(
    slots_ptr,  # see accept_drafts_torch
    starts_ptr,
    own_counts_ptr,
    sample_slots_ptr,
    firsts_ptr,
    tokens_ptr,
    drafts_ptr,
    places_ptr,
    index_ptr,
    stride,
    places_stride,
    null_slot,
    max_len,
    FORM: tl.constexpr,  # `AcceptForm`
):
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, at = tl.program_id(0), tl.arange(0, FORM.lanes)
    inside = at < FORM.row_len
    slot, start = tl.load(slots_ptr + row), tl.load(starts_ptr + row)
    own = slot.to(tl.int64)
    wanted = tl.load(sample_slots_ptr + row * FORM.row_len + at, mask=inside, other=0) != null_slot
    positions = start + at
    known = inside & (positions < max_len)
    sampled = tl.load(tokens_ptr + own * stride + positions, mask=known, other=0)
    drafted = tl.load(drafts_ptr + own * FORM.width + positions % FORM.width, mask=known, other=-1)
    is_accepted = (drafted == sampled) & (at < tl.load(own_counts_ptr + row) - 1)
    last = tl.min(tl.where(inside & wanted & (is_accepted == 0), at, FORM.row_len), axis=0)
    has_sample = last < FORM.row_len
    last = tl.where(has_sample, last, 0)
    tl.store(index_ptr + row, tl.load(firsts_ptr + row) + last)
    next_position = start + last + 1
    fits = has_sample & (next_position < max_len)
    tl.store(places_ptr + 2 * places_stride + row, tl.where(fits, slot, null_slot))
    tl.store(places_ptr + 3 * places_stride + row, tl.where(fits, next_position, 0))


@jit(do_not_specialize=["n", "null_slot", "max_len"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _keep_drafts_kernel(
    token_ids_ptr,  # see keep_drafts_torch
    places_ptr,
    drafts_ptr,
    places_stride,
    n,
    null_slot,
    max_len,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = rows < n
    slots = tl.load(places_ptr + 2 * places_stride + rows, mask=inside, other=0)
    positions = tl.load(places_ptr + 3 * places_stride + rows, mask=inside, other=0)
    token_ids = tl.load(token_ids_ptr + rows, mask=inside, other=0)
    tl.store(drafts_ptr + slots.to(tl.int64) * WIDTH + positions % WIDTH, token_ids, mask=inside)
    tl.store(places_ptr + rows, slots, mask=inside)
    tl.store(places_ptr + places_stride + rows, positions, mask=inside)
    fits = (slots != null_slot) & (positions + 1 < max_len)
    tl.store(places_ptr + 2 * places_stride + rows, tl.where(fits, slots, null_slot), mask=inside)
    tl.store(places_ptr + 3 * places_stride + rows, tl.where(fits, positions + 1, 0), mask=inside)


@jit(do_not_specialize=["row_len"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _keep_block_ends_kernel(
    hidden_ptr,  # see keep_block_ends_torch
    slots_ptr,
    starts_ptr,
    own_counts_ptr,
    tables_ptr,
    block_features_ptr,
    table_stride,
    hidden,
    row_len,
    factor,
    block_size,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    row, at = token // row_len, token % row_len
    next_position = tl.load(starts_ptr + row) + at
    is_end = (next_position % block_size == 0) & (next_position > 0)
    if is_end & (at < tl.load(own_counts_ptr + row)):
        table_ptr = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
        block = tl.load(table_ptr + next_position // block_size - 1) // factor
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        values = tl.load(hidden_ptr + token.to(tl.int64) * hidden + columns, mask=columns < hidden)
        tl.store(block_features_ptr + block.to(tl.int64) * hidden + columns, values, mask=columns < hidden)


def accept_drafts(
    slots: torch.Tensor,
    starts: torch.Tensor,
    own_counts: torch.Tensor,
    sample_slots: torch.Tensor,
    firsts: torch.Tensor,
    tokens: torch.Tensor,
    drafts: torch.Tensor,
    places: torch.Tensor,
    index: torch.Tensor,
) -> None:
    """`accept_drafts_torch` as one kernel."""
    n, pdl = len(slots), use_pdl(tokens)
    row_len = len(sample_slots) // n
    _accept_drafts_kernel[(n,)](
        slots, starts, own_counts, sample_slots, firsts, tokens, drafts, places, index, tokens.stride(0),
        places.stride(0), len(tokens) - 1, tokens.shape[1],
        AcceptForm(row_len, next_power_of_2(row_len), DRAFT_WIDTH, pdl), num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def keep_drafts(token_ids: torch.Tensor, places: torch.Tensor, drafts: torch.Tensor, max_len: int) -> None:
    """`keep_drafts_torch` as one kernel."""
    n, pdl = len(token_ids), use_pdl(token_ids)
    _keep_drafts_kernel[(-(-n // _LANES),)](
        token_ids, places, drafts, places.stride(0), n, len(drafts) - 1, max_len,
        WIDTH=DRAFT_WIDTH, LANES=_LANES, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def keep_block_ends(
    hidden: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    own_counts: torch.Tensor,
    tables: torch.Tensor,
    factor: int,
    block_size: int,
    block_features: torch.Tensor,
) -> None:
    """`keep_block_ends_torch` as one kernel; `hidden` is contiguous."""
    (num_tokens, width), pdl = hidden.shape, use_pdl(hidden)
    _keep_block_ends_kernel[(num_tokens, -(-width // _COLUMNS))](
        hidden, slots, starts, own_counts, tables, block_features, tables.stride(0), width, num_tokens // len(slots),
        factor, block_size, COLUMNS=_COLUMNS, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
