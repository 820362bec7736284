"""Pinned acceptance, for benchmarks with random weights: draft tokens become samples, whatever the model's logits are.

The first floor(mean - 1) draft tokens of a round are accepted, and the next one with the fraction's chance. A hash of
slot and position decides, so that all ranks decide alike.
"""

from __future__ import annotations

import torch

from runtime.kernels.sampling.gumbel import hash_of_words, noise_bits
from runtime.kernels.step.draft_rows import DRAFT_WIDTH
from runtime.kernels.triton_language import ROW_ARRAYS, jit, tl, use_pdl

_CHANCES = 1 << 23  # values of noise_bits


def split_mean(mean: float) -> tuple[int, int]:
    """(draft tokens that are always accepted, the next one's chance in _CHANCES) for a mean of accepted tokens."""
    always = int(mean - 1)
    return always, round((mean - 1 - always) * _CHANCES)


def pin_samples_torch(
    token_ids: torch.Tensor,  # [n] int32, changed in place
    slots: torch.Tensor,  # [n] int32; a row's samples follow each other
    positions: torch.Tensor,  # [n] int32
    tokens: torch.Tensor | None,  # [num_slots + 1, max_model_len] int32, changed in place if given
    drafts: torch.Tensor,  # [num_slots + 1, DRAFT_WIDTH] int32 (kernels/step/draft_rows.py)
    mean: float,
) -> None:
    """Replace the samples at accepted draft tokens."""
    always, chance = split_mean(mean)
    follows = (slots.diff() == 0) & (positions.diff() == 1)
    no = follows.new_zeros(1)
    index = torch.arange(len(slots), device=slots.device)
    number = index - torch.cummax(index * ~torch.cat((no, follows)), 0).values
    drafted = drafts[slots.long(), (positions % DRAFT_WIDTH).long()]
    bits = noise_bits(torch.stack((slots, torch.zeros_like(slots))), positions.clone())
    is_pinned = (number < always) | ((number == always) & (bits < chance))
    is_pinned &= torch.cat((follows, no)) & (drafted >= 0)
    token_ids.copy_(torch.where(is_pinned, drafted, token_ids))
    if tokens is not None:
        tokens[slots[is_pinned].long(), positions[is_pinned].long()] = drafted[is_pinned]


@jit(do_not_specialize=["n"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _pin_samples_kernel(
    token_ids_ptr,  # see pin_samples_torch
    slots_ptr,
    positions_ptr,
    tokens_ptr,
    drafts_ptr,
    stride,
    n,
    always,
    chance,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sample = tl.program_id(0)
    slot, position = tl.load(slots_ptr + sample), tl.load(positions_ptr + sample)
    back = tl.arange(0, WIDTH)
    before = sample - back
    is_same = tl.load(slots_ptr + before, mask=before >= 0, other=-1) == slot
    is_same &= tl.load(positions_ptr + before, mask=before >= 0, other=-1) == position - back
    number = tl.min(tl.where(is_same, WIDTH, back), axis=0) - 1
    behind = sample + 1 < n
    follows = tl.load(slots_ptr + sample + 1, mask=behind, other=-1) == slot
    follows &= tl.load(positions_ptr + sample + 1, mask=behind, other=-1) == position + 1
    drafted = tl.load(drafts_ptr + slot.to(tl.int64) * WIDTH + position % WIDTH)
    bits = (hash_of_words(position ^ slot, 0) >> 9) & ((1 << 23) - 1)
    is_pinned = (number < always) | ((number == always) & (bits < chance))
    if is_pinned & follows & (drafted >= 0):
        tl.store(token_ids_ptr + sample, drafted)
        tl.store(tokens_ptr + slot.to(tl.int64) * stride + position, drafted)


def pin_samples(
    token_ids: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    drafts: torch.Tensor,
    mean: float,
) -> None:
    """`pin_samples_torch` as one kernel."""
    n, pdl, (always, chance) = len(slots), use_pdl(tokens), split_mean(mean)
    if n:
        _pin_samples_kernel[(n,)](
            token_ids, slots, positions, tokens, drafts, tokens.stride(0), n, always, chance,
            WIDTH=DRAFT_WIDTH, PDL=pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
