"""Rotary position embedding of q and k in place, and the store of k and v into the paged cache."""

from __future__ import annotations

import math

import torch

from runtime.kernels._triton import jit, next_power_of_2, tl
from runtime.models.spec import RopeSpec


def rope_table(rope: RopeSpec, head_dim: int, num_positions: int, dtype: torch.dtype) -> torch.Tensor:
    """[2, num_positions, head_dim]: cos, and sin with its first half negated, so that rotate_half is a plain roll.

    Frequencies as in transformers' modeling_rope_utils; llama3 is the smooth band between kept short wavelengths and
    fully stretched long ones of Llama 3.1's reference code."""
    freqs = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.type == "linear":
        freqs = freqs / rope.factor
    elif rope.type == "llama3":
        wavelengths = 2 * math.pi / freqs
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = ((rope.original_positions / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
        freqs = (1 - smooth) * freqs / rope.factor + smooth * freqs
    angles = torch.arange(num_positions).float()[:, None] * freqs
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).to(dtype)


def rope_store_kv_torch(
    qkv: torch.Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; may be overwritten
    cos: torch.Tensor,  # [num_tokens, 1, head_dim]
    sin: torch.Tensor,  # [num_tokens, 1, head_dim], first half negated
    kv: torch.Tensor,  # [2, num_kv_heads, num_blocks, block_size, head_dim], one layer's cache
    kv_index: torch.Tensor,  # [num_tokens] int64: block * block_size + offset
) -> torch.Tensor:
    """q, rotated: [num_tokens, num_heads, head_dim], here a view of qkv; k, rotated, and v go into the cache."""
    num_kv_heads, head_dim = kv.shape[1], kv.shape[4]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    qk = qkv[:, : num_heads + num_kv_heads]
    # Products and sum are separate, hence each exactly rounded: bits depend on no vector width and no thread split.
    turned = qk.roll(head_dim // 2, -1).mul_(sin)
    qk.mul_(cos).add_(turned)
    kv.view(2 * num_kv_heads, -1, head_dim).index_copy_(1, kv_index, qkv[:, num_heads:].transpose(0, 1))
    return qkv[:, :num_heads]


@jit
def _rope_store_kv_kernel(
    qkv_ptr,  # [num_tokens, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM] contiguous
    cos_ptr,  # [num_tokens, HEAD_DIM] contiguous
    sin_ptr,  # [num_tokens, HEAD_DIM] contiguous, first half negated
    kv_ptr,  # [2 * NUM_KV_HEADS, positions, HEAD_DIM] contiguous
    kv_index_ptr,  # [num_tokens] int64
    q_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM] contiguous
    positions,  # of one head's cache
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,  # power of two, at least all heads
    BLOCK_DIM: tl.constexpr,  # power of two, at least HEAD_DIM
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    total: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    inside = (heads < total) & (dims < HEAD_DIM)
    at = qkv_ptr + (token * total + heads) * HEAD_DIM
    partner = tl.where(dims < HEAD_DIM // 2, dims + HEAD_DIM // 2, dims - HEAD_DIM // 2)
    x = tl.load(at + dims, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(at + partner, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
    out = tl.where(heads < NUM_HEADS + NUM_KV_HEADS, x * cos + y * sin, x)
    at_q = q_ptr + (token * NUM_HEADS + heads) * HEAD_DIM + dims
    tl.store(at_q, out.to(q_ptr.dtype.element_ty), mask=inside & (heads < NUM_HEADS))
    place = (heads - NUM_HEADS).to(tl.int64) * positions + tl.load(kv_index_ptr + token)
    at_kv = kv_ptr + place * HEAD_DIM + dims
    tl.store(at_kv, out.to(kv_ptr.dtype.element_ty), mask=inside & (heads >= NUM_HEADS))


def rope_store_kv_triton(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv: torch.Tensor, kv_index: torch.Tensor
) -> torch.Tensor:
    """`rope_store_kv_torch` as one kernel, a program a token. q is a tensor of its own: in place, one thread would
    read an element that another has already turned."""
    num_tokens, num_all, head_dim = qkv.shape
    num_kv_heads = kv.shape[1]
    num_heads = num_all - 2 * num_kv_heads
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        block_heads, block_dim = next_power_of_2(num_all), next_power_of_2(head_dim)
        _rope_store_kv_kernel[(num_tokens,)](
            qkv, cos, sin, kv, kv_index, q, kv.shape[2] * kv.shape[3],
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
            BLOCK_HEADS=block_heads, BLOCK_DIM=block_dim, num_warps=min(max(block_heads * block_dim // 512, 1), 8),
        )  # fmt: skip
    return q
