"""Keys and values as a cache stores them: in the compute dtype, or as codes of 8 bits with scales.

float8_e4m3fn   each head has one scale for all keys and one for all values: number = code * scale
int8            each token's key and value have a scale in each head, which follows from their largest component

What attention reads is always what is stored, also of the step's own tokens: neither chunks nor prefix hits can show.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from runtime.kernels._triton import INTERPRETED, constexpr, jit, tl

# Weights times the scales of values are float16: in this unit scales of 1e-6 to 1,000 have all their digits.
VALUE_UNIT = constexpr(64.0)
_INTERPRETED = constexpr(INTERPRETED)
MAX_CODE = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


class KVLayer(NamedTuple):
    """One layer's cache."""

    values: torch.Tensor  # [2 (k, v), num_kv_heads, num_blocks, block_size, head_dim]
    # Of e4m3 codes float32 [2, num_kv_heads]; of int8 codes float16 [2, num_kv_heads, num_blocks, block_size].
    scales: torch.Tensor | None = None


def scaling(scales: torch.Tensor | None) -> Literal["none", "head", "token"]:
    """What has a scale of its own; the SCALES of the kernels."""
    if scales is None:
        return "none"
    return "head" if scales.dim() == 2 else "token"


def store_kv_torch(
    numbers: torch.Tensor,  # [num_tokens, 2 * num_kv_heads, head_dim], the keys of all heads first
    kv: torch.Tensor,
    scales: torch.Tensor | None,
    kv_index: torch.Tensor,  # [num_tokens] int64, block * block_size + offset
) -> None:
    """Write tokens' keys and values into a layer's cache. What is not finite stays so."""
    codes, heads = numbers.transpose(0, 1), 2 * kv.shape[1]
    stored = kv.view(heads, -1, kv.shape[-1])
    if scales is not None:
        largest, wide = MAX_CODE[kv.dtype], codes.float()
        if scales.dim() == 2:
            wide = wide * (1 / scales.view(heads, 1, 1))
        else:
            own = (wide.abs().amax(-1) / largest).to(scales.dtype)
            scales.view(heads, -1).index_copy_(1, kv_index, own)
            inverse = torch.where(own > 0, 1 / own.float(), 0.0)  # a head of zeros has scale 0
            wide = (wide * inverse.unsqueeze(-1)).round()
        codes, stored = wide.clamp(-largest, largest).to(kv.dtype).view(torch.int8), stored.view(torch.int8)
    stored.index_copy_(1, kv_index, codes)


def restore_kv(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [2, ..., head_dim] of codes read from a cache, and of their scales as they are beside it: of all
    dimensions but the last, or [2, num_kv_heads], the latter at the dimension before those of positions."""
    if scales.dim() == 2:
        scales = scales.view(2, *(1,) * (codes.dim() - 4), -1, 1)
    return codes.float() * scales.unsqueeze(-1)


@jit
def within(x, LARGEST: tl.constexpr):
    """x, or the nearest number of up to LARGEST; NaN stays."""
    return tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))


@jit
def to_whole(x):
    """Numbers of a small magnitude rounded half to even."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: float32 has no digits behind the point there


@jit
def to_e4m3(x):
    """Numbers within 448 as the nearest codes."""
    if _INTERPRETED:  # the interpreter's cast does not carry into the exponent; of codes' numbers it is exact
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)  # 1.5 * 2 ** 14: steps of 2 ** -9
    return x.to(tl.float8e4nv)


@jit
def prepare_q(q, scales_ptr, kv_head, scale_log2, SCALES: tl.constexpr):
    """q as it is multiplied with codes: the scale of scores and, with SCALES "head", of keys is in it, so that scores
    are in units of log2; of "token" but for that of each key. In float16, of which codes of 8 bits are numbers; 16-bit
    numbers of q lose no digits that scores have, and underflow where they do not count."""
    if SCALES == "head":
        scale_log2 *= tl.load(scales_ptr + kv_head)
    scaled = q.to(tl.float32) * scale_log2
    if q.dtype != tl.float32:
        scaled = scaled.to(tl.float16)
    return scaled


@jit
def finish_total(total, scales_ptr, kv_head, num_kv_heads, SCALES: tl.constexpr):
    """What the weighted sum of values' codes is divided by."""
    if SCALES == "head":
        total = total / tl.load(scales_ptr + num_kv_heads + kv_head)
    if SCALES == "token":
        total = total * VALUE_UNIT
    return total
