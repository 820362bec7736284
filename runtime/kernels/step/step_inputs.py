"""The decoder's inputs, built on the device from the requests' state: the host sends rows, never tokens (C2)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.triton_language import ROW_ARRAYS, jit, tl, use_pdl

_TILE = 128  # tokens per program: 128 rows' single tokens in a decode step, or one row's

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def build_inputs_torch(
    slots: torch.Tensor,  # [num_rows] int32
    starts: torch.Tensor,  # [num_rows] int32, position of the row's first token
    q_starts: torch.Tensor,  # [num_rows + 1] int32, the row's first token in the step; the last is num_tokens
    tokens: torch.Tensor,  # [num_slots + 1, max_model_len] int32, any stride between rows
    tables: torch.Tensor,  # [num_slots + 1, num_groups * max_blocks] int32 block ids, the same stride
    block_size: int,
    num_tokens: int,
    max_count: int,  # most tokens in a row
    own_counts: torch.Tensor | None = None,  # [num_rows] int32: a row's real tokens; the rest is padding
    adapters: torch.Tensor | None = None,  # [num_slots + 1] int32, has the row stride of tokens
    num_groups: int = 1,  # layer groups with their own tables
    rope_deltas: torch.Tensor | None = None,  # [num_slots + 1] int32, has the row stride of tokens; positions add them
) -> Inputs:
    """token ids, positions, kv_index and perhaps adapters: int32 [num_tokens].

    kv_index is [num_groups, num_tokens]: block * block_size + offset in each group.

    Padding tokens have id 0, store k and v in the null block, and use adapter 0 (none)."""
    counts = q_starts.diff()
    row_of = torch.repeat_interleave(torch.arange(len(slots), device=slots.device), counts, output_size=num_tokens)
    step = torch.arange(num_tokens, dtype=torch.int32, device=slots.device)
    positions = starts[row_of] + step - q_starts[row_of]
    slot_of = slots[row_of].long()
    token_ids = tokens[slot_of, positions.long()]
    own = tables.view(len(tables), num_groups, -1)[slot_of, :, positions // block_size].T
    kv_index = own * block_size + positions % block_size
    if rope_deltas is not None:
        positions = positions + rope_deltas[slot_of]
    if own_counts is not None:
        is_own = step - q_starts[row_of] < own_counts[row_of]
        token_ids, kv_index = token_ids * is_own, kv_index * is_own
    if adapters is None:
        return token_ids, positions, kv_index, None
    return token_ids, positions, kv_index, adapters[slot_of] * (1 if own_counts is None else is_own)


class InputsForm(NamedTuple):
    """Constants of `_build_inputs_kernel`."""

    groups: int
    rows: int  # rows per program
    tokens: int  # tokens per row
    own_counts: bool
    adapters: bool
    pdl: bool


@jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _build_inputs_kernel(
    slots_ptr,  # [num_rows]
    starts_ptr,  # [num_rows]
    q_starts_ptr,  # [num_rows + 1]
    tokens_ptr,  # [num_slots + 1, max_model_len], rows stride apart
    tables_ptr,  # [num_slots + 1, GROUPS * max_blocks], rows stride apart
    own_counts_ptr,  # [num_rows]; read with OWN_COUNTS
    adapters_ptr,  # [num_slots + 1], stride apart; read with ADAPTERS
    rope_deltas_ptr,  # [num_slots + 1], stride apart, or None
    out_ptr,  # [2 + GROUPS, num_tokens], or [3 + GROUPS, num_tokens]
    stride,
    num_rows,
    num_tokens,
    block_size,
    max_blocks,
    FORM: tl.constexpr,  # `InputsForm`
):
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.program_id(0) * FORM.rows + tl.arange(0, FORM.rows)
    inside = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=inside, other=0).to(tl.int64)[:, None]
    starts = tl.load(starts_ptr + rows, mask=inside, other=0)[:, None]
    first = tl.load(q_starts_ptr + rows, mask=inside, other=0)[:, None]
    end = tl.load(q_starts_ptr + rows + 1, mask=inside, other=0)[:, None]
    at = tl.program_id(1) * FORM.tokens + tl.arange(0, FORM.tokens)[None, :]
    own = first + at < end  # false for a missing row's tokens
    positions = starts + at
    known = own
    if FORM.own_counts:
        known = own & (at < tl.load(own_counts_ptr + rows, mask=inside, other=0)[:, None])
    token_ids = tl.load(tokens_ptr + slots * stride + positions, mask=known, other=0)
    out = out_ptr + first + at
    tl.store(out, token_ids, mask=own)
    if rope_deltas_ptr is None:
        tl.store(out + num_tokens, positions, mask=own)
    else:
        deltas = tl.load(rope_deltas_ptr + slots * stride, mask=inside[:, None], other=0)
        tl.store(out + num_tokens, positions + deltas, mask=own)
    for group in tl.static_range(tl.constexpr(FORM.groups)):
        entries = tables_ptr + slots * stride + group * max_blocks + positions // block_size
        blocks = tl.load(entries, mask=known, other=0)
        kv_index = tl.where(known, blocks * block_size + positions % block_size, 0)
        tl.store(out + (2 + group) * num_tokens, kv_index, mask=own)
    if FORM.adapters:
        adapters = tl.load(adapters_ptr + slots * stride, mask=inside[:, None], other=0)
        tl.store(out + (2 + FORM.groups) * num_tokens, tl.where(known, adapters, 0), mask=own)


def build_inputs(
    slots: torch.Tensor,
    starts: torch.Tensor,
    q_starts: torch.Tensor,
    tokens: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    num_tokens: int,
    max_count: int,
    own_counts: torch.Tensor | None = None,
    adapters: torch.Tensor | None = None,
    num_groups: int = 1,
    rope_deltas: torch.Tensor | None = None,
) -> Inputs:
    """`build_inputs_torch` as one kernel; its grid depends only on ints of the host."""
    num_rows = len(slots)
    has_adapters = adapters is not None
    out = torch.empty((2 + num_groups + has_adapters, num_tokens), dtype=torch.int32, device=slots.device)
    per_row = 1 if max_count == 1 else 8 if max_count <= 8 else _TILE
    pdl = use_pdl(out)
    _build_inputs_kernel[(-(-num_rows * per_row // _TILE), -(-max_count // per_row))](
        slots, starts, q_starts, tokens, tables, slots if own_counts is None else own_counts,
        slots if adapters is None else adapters, rope_deltas, out, tokens.stride(0), num_rows, num_tokens, block_size,
        tables.shape[1] // num_groups,
        FORM=InputsForm(
            groups=num_groups, rows=_TILE // per_row, tokens=per_row, own_counts=own_counts is not None,
            adapters=has_adapters, pdl=pdl,
        ),
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return out[0], out[1], out[2 : 2 + num_groups], out[-1] if has_adapters else None
