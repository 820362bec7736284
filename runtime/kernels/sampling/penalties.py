"""Penalties for the tokens of a request, applied to its logits before a token is chosen.

The kernel counts the tokens of the request's slot up to the sampled position. These include draft tokens and tokens
that the host has not received, and counts stay right after a preemption.
"""

from __future__ import annotations

import torch

from runtime.kernels.sampling.sample import COLUMNS, PENALISED_FROM, PRESENCE, PROMPT_LEN, REPETITION
from runtime.kernels.sampling.token_keys import is_penalised, load_float
from runtime.kernels.triton_language import ROW_ARRAYS, jit, tl, use_pdl

NUM_TABLES = 64  # count tables, each with a vocabulary's size; more rows take turns
_BLOCK = 2048  # tokens at once


def penalise_torch(
    logits: torch.Tensor,  # [n, vocab] float32, changed in place
    slots: torch.Tensor,  # [n] int32
    positions: torch.Tensor,  # [n] int32, positions to be sampled
    tokens: torch.Tensor,  # [num_slots, max_model_len] int32; ignored from the row's position on
    params: torch.Tensor,  # [num_slots, NUM_PARAMS] int32
    all_rows: bool,  # false for rows at or after PENALISED_FROM alone, if that is not 0
) -> None:
    """Repetition (arXiv 1909.05858) over prompt and output; OpenAI's frequency and presence over output."""
    own = params.index_select(0, slots)
    penalties = own.view(torch.float32)[:, REPETITION : PRESENCE + 1]
    is_penalised = (penalties != torch.tensor([1.0, 0.0, 0.0], device=own.device)).any(1)
    from_here = (own[:, PENALISED_FROM] > 0) & (positions >= own[:, PENALISED_FROM])
    rows = (is_penalised if all_rows else from_here).nonzero().squeeze(1)
    if not len(rows):
        return
    repetition, frequency, presence = penalties[rows].unsqueeze(2).unbind(1)
    at = torch.arange(int(positions[rows].max()), device=tokens.device)
    known = at < positions[rows, None]
    output = known & (at >= own[rows, PROMPT_LEN, None])
    ids, chosen = tokens[slots[rows].long(), : len(at)].long(), logits.index_select(0, rows)
    seen = torch.zeros_like(chosen).scatter_add_(1, ids, known.float()) > 0
    counts = torch.zeros_like(chosen).scatter_add_(1, ids, output.float())
    factor = torch.where(chosen > 0, 1.0 / repetition, repetition)
    chosen.mul_(factor.where(seen, 1.0)).sub_(counts * frequency).sub_((counts > 0) * presence)
    logits.index_copy_(0, rows, chosen)


@jit(do_not_specialize=["n"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _penalties_kernel(
    logits_ptr,  # [n, vocab] float32, rows logits_stride apart
    slots_ptr,  # [n]
    positions_ptr,  # [n]
    tokens_ptr,  # [num_slots + 1, max_model_len] int32, rows state_stride apart
    params_ptr,  # [num_slots + 1, NUM_PARAMS] int32, rows state_stride apart
    tables_ptr,  # [at least the number of programs, vocab] int32 zeros, before and after
    n,
    vocab,
    logits_stride,
    state_stride,
    AT: tl.constexpr,  # `Columns`
    ALL_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program counts a row's tokens in its table. Among equal tokens, the first to clear the count applies it."""
    num_penalised = tl.full([], 0, tl.int32)
    for row in range(tl.program_id(0), n, tl.num_programs(0)):
        params = params_ptr + tl.load(slots_ptr + row).to(tl.int64) * state_stride
        num_penalised += is_penalised(params, tl.load(positions_ptr + row), AT, ALL_ROWS).to(tl.int32)
    if PDL:  # the step's head wrote rows and parameters
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if num_penalised > 0:
        table_ptr = tables_ptr + tl.program_id(0).to(tl.int64) * vocab
        for row in range(tl.program_id(0), n, tl.num_programs(0)):
            known_ptr = tokens_ptr + tl.load(slots_ptr + row).to(tl.int64) * state_stride
            params = params_ptr + tl.load(slots_ptr + row).to(tl.int64) * state_stride
            position = tl.load(positions_ptr + row)
            if is_penalised(params, position, AT, ALL_ROWS):
                row_logits = logits_ptr + tl.cast(row, tl.int64) * logits_stride
                repetition, prompt_len = load_float(params + AT.repetition), tl.load(params + AT.prompt_len)
                frequency, presence = load_float(params + AT.frequency), load_float(params + AT.presence)
                for start in range(0, position, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    ids = tl.load(known_ptr + at, mask=at < position, other=0)
                    is_output = at >= prompt_len
                    tl.atomic_add(table_ptr + ids, 1, mask=(at < position) & is_output, sem="relaxed")
                    tl.atomic_or(table_ptr + ids, 1 << 30, mask=(at < position) & ~is_output, sem="relaxed")
                tl.debug_barrier()
                for start in range(0, position, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    ids = tl.load(known_ptr + at, mask=at < position, other=0)
                    taken = tl.atomic_xchg(table_ptr + ids, 0, mask=at < position, sem="relaxed")
                    mine = (at < position) & (taken != 0)
                    logits = tl.load(row_logits + ids, mask=mine, other=0.0)
                    counts = (taken & ((1 << 30) - 1)).to(tl.float32)
                    logits *= tl.where(logits > 0, tl.div_rn(1.0, repetition), repetition)
                    logits = logits - counts * frequency - tl.where(counts > 0, presence, 0.0)
                    tl.store(row_logits + ids, logits, mask=mine)
                tl.debug_barrier()


def penalise_triton(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    params: torch.Tensor,  # has the row stride of tokens
    all_rows: bool,
    tables: torch.Tensor,  # [NUM_TABLES, vocab] int32: 0, before and after
) -> None:
    """`penalise_torch` as one kernel, which does nothing for rows without penalties."""
    n, pdl = len(slots), use_pdl(logits)
    if n:
        # Products and differences are rounded one by one, as the twin does it.
        _penalties_kernel[(min(n, len(tables)),)](
            logits, slots, positions, tokens, params, tables, n, logits.shape[1], logits.stride(0), params.stride(0),
            COLUMNS, all_rows, _BLOCK, pdl, num_warps=8, launch_pdl=pdl, enable_fp_fusion=False,
        )  # fmt: skip
