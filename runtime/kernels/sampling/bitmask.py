"""Masks of logits: a token stays possible if its bit is set."""

from __future__ import annotations

import math

import torch

from runtime.kernels.triton_language import ROW_ARRAYS, jit, tl, use_pdl

_TILE = 2048  # tokens per program


def apply_bitmask_torch(
    logits: torch.Tensor,  # [m, vocab] float32, changed in place: -inf where a token is not allowed
    rows: torch.Tensor,  # [n] int32, different logits rows
    words: torch.Tensor,  # [n, ceil(vocab / 32)] int32; bit i % 32 in word i // 32 allows token i
) -> None:
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = ((words[:, :, None] >> bits) & 1).bool().view(len(words), -1)[:, : logits.shape[1]]
    chosen = logits.index_select(0, rows)
    logits.index_copy_(0, rows.long(), chosen.masked_fill_(~allowed, -math.inf))


@jit(do_not_specialize_on_alignment=[*ROW_ARRAYS, "words_ptr"])
def _apply_bitmask_kernel(
    logits_ptr,  # [m, vocab] fp32, rows logits_stride apart
    rows_ptr,  # [n]
    words_ptr,  # [n, num_words] int32
    vocab,
    num_words,
    logits_stride,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    words = tl.load(words_ptr + at * num_words + ids // 32, mask=ids < vocab, other=-1)
    row = logits_ptr + tl.load(rows_ptr + at).to(tl.int64) * logits_stride
    tl.store(row + ids, -float("inf"), mask=((words >> (ids % 32)) & 1) == 0)


def apply_bitmask_triton(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    """`apply_bitmask_torch` as one kernel; it writes the excluded tokens only."""
    vocab, pdl = logits.shape[1], use_pdl(logits)
    _apply_bitmask_kernel[(-(-vocab // _TILE), len(rows))](
        logits, rows, words, vocab, words.shape[1], logits.stride(0), TILE=_TILE, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
