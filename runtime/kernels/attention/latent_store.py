"""Stores a step's latents in one kernel: their norm, the rotation of their keys and q, and the write."""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.attention.latent_torch import LatentForm
from runtime.kernels.triton_language import ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl

_TILE = 1024  # pairs in a program that rotates q heads


class StoreForm(NamedTuple):
    """Constants of `_latent_store_kernel`."""

    num_heads: int
    head_dim: int
    rank: int
    rope: int
    interleaved: bool
    block_heads: int  # heads per program
    block_rank: int  # power of two, at least RANK
    block_half: int  # power of two, at least ROPE / 2
    pdl: bool


@jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def _latent_store_kernel(
    q_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM], tokens q_stride apart; a head's last ROPE elements are rotated
    latents_ptr,  # [num_tokens, RANK + ROPE], tokens latents_stride apart
    table_ptr,  # [2, num_positions, ROPE], rows contiguous, cos and sin sin_offset apart
    positions_ptr,  # [num_tokens] int32 or int64
    norm_ptr,  # [RANK]
    kv_ptr,  # [cache_positions, RANK + ROPE] contiguous
    kv_index_ptr,  # [num_tokens] int32 or int64
    q_stride,
    latents_stride,
    sin_offset,
    eps,
    FORM: tl.constexpr,  # `StoreForm`
):
    HALF: tl.constexpr = FORM.rope // 2
    STEP: tl.constexpr = 2 if FORM.interleaved else 1  # distance of pairs
    OTHER: tl.constexpr = 1 if FORM.interleaved else HALF  # distance within a pair
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, FORM.block_half)
    is_pair = pairs < HALF
    # Before the wait: q and latents come from the kernels right before this one, positions and kv_index do not.
    row = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * FORM.rope + HALF + pairs  # here sin is not negated
    cos = tl.load(row, mask=is_pair, other=0.0).to(tl.float32)
    sin = tl.load(row + sin_offset, mask=is_pair, other=0.0).to(tl.float32)
    place = kv_ptr + tl.load(kv_index_ptr + token).to(tl.int64) * (FORM.rank + FORM.rope)
    cols = tl.arange(0, FORM.block_rank)
    weight = tl.load(norm_ptr + cols, mask=cols < FORM.rank, other=0.0).to(tl.float32)
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.program_id(1) == 0:
        latent = latents_ptr + token * latents_stride
        x = tl.load(latent + cols, mask=cols < FORM.rank, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / FORM.rank + eps)
        tl.store(place + cols, (x * scale * weight).to(kv_ptr.dtype.element_ty), mask=cols < FORM.rank)
        key = latent + FORM.rank + pairs * STEP
        first = tl.load(key, mask=is_pair, other=0.0).to(tl.float32)
        second = tl.load(key + OTHER, mask=is_pair, other=0.0).to(tl.float32)
        stored = place + FORM.rank + pairs * STEP
        tl.store(stored, (first * cos - second * sin).to(kv_ptr.dtype.element_ty), mask=is_pair)
        tl.store(stored + OTHER, (second * cos + first * sin).to(kv_ptr.dtype.element_ty), mask=is_pair)
    else:
        heads = (tl.program_id(1) - 1) * FORM.block_heads + tl.arange(0, FORM.block_heads)[:, None]
        inside = (heads < FORM.num_heads) & is_pair[None, :]
        at = q_ptr + token * q_stride + heads * FORM.head_dim + (FORM.head_dim - FORM.rope) + pairs[None, :] * STEP
        q_first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        q_second = tl.load(at + OTHER, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, (q_first * cos[None, :] - q_second * sin[None, :]).to(q_ptr.dtype.element_ty), mask=inside)
        tl.store(at + OTHER, (q_second * cos[None, :] + q_first * sin[None, :]).to(q_ptr.dtype.element_ty), mask=inside)


def latent_store_triton(
    q: torch.Tensor,  # heads contiguous, any stride between tokens
    latents: torch.Tensor,  # any stride between tokens
    rope: tuple[torch.Tensor, torch.Tensor],  # `rope_rows_triton`'s result
    kv: torch.Tensor,
    kv_index: torch.Tensor,  # int32; like the positions, not written by the kernel right before this one
    form: LatentForm,
) -> None:
    """`latent_store_torch` as one kernel. Its tiles have one shape for any number of tokens."""
    (num_tokens, num_heads, head_dim), (table, positions), (norm, eps, interleaved) = q.shape, rope, form
    if not num_tokens:
        return
    rank, rope_dim, pdl = len(norm), table.shape[2], use_pdl(q)
    block_half = next_power_of_2(max(rope_dim // 2, 1))
    block_heads = min(next_power_of_2(num_heads), max(_TILE // block_half, 1))
    _latent_store_kernel[(num_tokens, 1 + -(-num_heads // block_heads))](
        q, latents, table, positions, norm, kv, kv_index, q.stride(0), latents.stride(0), table.stride(0), eps,
        FORM=StoreForm(
            num_heads=num_heads, head_dim=head_dim, rank=rank, rope=rope_dim, interleaved=interleaved,
            block_heads=block_heads, block_rank=next_power_of_2(rank), block_half=block_half, pdl=pdl,
        ),
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
