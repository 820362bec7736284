"""Rotary position embedding of q and k in place, and the store of k and v into the paged cache."""

from __future__ import annotations

import math

import torch

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
    qkv: torch.Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; q and k are rotated in place
    cos: torch.Tensor,  # [num_tokens, 1, head_dim]
    sin: torch.Tensor,  # [num_tokens, 1, head_dim], first half negated
    kv: torch.Tensor,  # [2, num_kv_heads, num_blocks, block_size, head_dim], one layer's cache
    kv_index: torch.Tensor,  # [num_tokens] int64: block * block_size + offset
) -> torch.Tensor:
    """q: [num_tokens, num_heads, head_dim], a view of qkv."""
    num_kv_heads, head_dim = kv.shape[1], kv.shape[4]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    qk = qkv[:, : num_heads + num_kv_heads]
    # Products and sum are separate, hence each exactly rounded: bits depend on no vector width and no thread split.
    turned = qk.roll(head_dim // 2, -1).mul_(sin)
    qk.mul_(cos).add_(turned)
    kv.view(2 * num_kv_heads, -1, head_dim).index_copy_(1, kv_index, qkv[:, num_heads:].transpose(0, 1))
    return qkv[:, :num_heads]
