"""Checksums of slots on their device, without the key's part. `runtime/tier/sums.py` has the definition."""

from __future__ import annotations

from functools import lru_cache

import torch

from runtime.kernels.triton_language import constexpr, jit, tl

# Steps and start of the words' weights, as signed integers
_STEP, _START = constexpr(0x9E3779B97F4A7C15 - 2**64), constexpr(0xD1B54A32D192ED03 - 2**64)
_BLOCK = 2048  # words that a program adds up


def slot_sums_torch(slots: torch.Tensor, size: int) -> torch.Tensor:
    """Each slot's sum over its first `size` words [n] int64; `slots` is int64 [n, slot_words]."""
    return slots[:, :size] @ _weights(size)


@lru_cache(4)
def _weights(size: int) -> torch.Tensor:
    step, start = (getattr(word, "value", word) for word in (_STEP, _START))
    weights: torch.Tensor = torch.arange(size) * step + start
    return weights | 1


@jit(do_not_specialize_on_alignment=["sums_ptr"])
def _slot_sums_kernel(slots_ptr, sums_ptr, size, slot_words, BLOCK: tl.constexpr):
    item = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(slots_ptr + item.to(tl.int64) * slot_words + at, mask=at < size, other=0)
    weights = (at.to(tl.int64) * _STEP + _START) | 1
    tl.atomic_add(sums_ptr + item, tl.sum(words * weights), sem="relaxed")


def slot_sums_triton(slots: torch.Tensor, size: int) -> torch.Tensor:
    """`slot_sums_torch` as one kernel. The order of additions does not change the sum."""
    sums = torch.zeros(len(slots), dtype=torch.int64, device=slots.device)
    _slot_sums_kernel[(len(slots), -(-size // _BLOCK))](slots, sums, size, slots.stride(0), BLOCK=_BLOCK, num_warps=4)
    return sums
