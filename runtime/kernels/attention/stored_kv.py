"""Keys and values as a cache stores them: in the compute dtype, or as codes of 8 bits with scales.

float8_e4m3fn   each head has one scale for all keys and one for all values: number = code * scale
int8            each token's key and value have a scale in each head, which follows from their largest component

What attention reads is always what is stored, also of the step's own tokens: neither chunks nor prefix hits can show.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from runtime.kernels.triton_language import INTERPRETED, constexpr, jit, tl

# Weights times the scales of values are float16. With 2 ** 6 for the largest weight, scales of 1e-6 to 1,000 have all
# their digits there.
WEIGHT_LOG2 = constexpr(6.0)
# Instructions for codes in four bytes, which become two pairs of float16. A whole number, 128 added, becomes the low
# bits of a float16 from 1,024 on, of which 1,152 is taken off.
_INT8_PAIRS = constexpr("""{
.reg .b32 x, a, b, m;
mov.b32 m, 0x64806480;
xor.b32 x, $2, 0x80808080;
prmt.b32 a, x, 0x64646464, 0x4240;
prmt.b32 b, x, 0x64646464, 0x4341;
sub.rn.f16x2 $0, a, m;
sub.rn.f16x2 $1, b, m;
}""")
_E4M3_PAIRS = constexpr("""{
.reg .b16 a, b;
.reg .b32 x;
prmt.b32 x, $2, 0, 0x3120;
mov.b32 {a, b}, x;
cvt.rn.f16x2.e4m3x2 $0, a;
cvt.rn.f16x2.e4m3x2 $1, b;
}""")
_TWO_OUTPUTS = constexpr("=r,=r,r")
_INTERPRETED = constexpr(INTERPRETED)
MAX_CODE = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


class KVLayer(NamedTuple):
    """One layer's cache."""

    values: torch.Tensor  # [2 (k, v), num_kv_heads, num_blocks, block_size, head_dim]
    # Of e4m3 codes float32 [2, num_kv_heads]; of int8 codes float16 [num_kv_heads, num_blocks, block_size, 2].
    scales: torch.Tensor | None = None


def scaling(scales: torch.Tensor | None) -> Literal["none", "head", "token"]:
    """The owner of a scale: nothing, a head, or a token in a head; the SCALES of the kernels."""
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
            scales.view(kv.shape[1], -1, 2)[:, kv_index] = own.view(2, kv.shape[1], -1).permute(1, 2, 0)
            inverse = torch.where(own > 0, 1 / own.float(), 0.0)  # a head of zeros has scale 0
            wide = (wide * inverse.unsqueeze(-1)).round()
        codes, stored = wide.clamp(-largest, largest).to(kv.dtype).view(torch.int8), stored.view(torch.int8)
    stored.index_copy_(1, kv_index, codes)


def restore_kv(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [2, ..., num_kv_heads, length, head_dim] of codes read from a cache, and of their scales, [2,
    num_kv_heads] or [..., num_kv_heads, length, 2]."""
    if scales.dim() == 2:
        return codes.float() * scales.view(2, *(1,) * (codes.dim() - 4), -1, 1, 1)
    return codes.float() * scales.movedim(-1, 0).unsqueeze(-1)


@jit
def to_whole(x):
    """Numbers of a small magnitude rounded half to even."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: float32 has no digits behind the point there


@jit
def decode_pairs(pairs, CODE: tl.constexpr, DTYPE: tl.constexpr):
    """The low and the high bytes of int16, codes of the type CODE, as numbers of another."""
    if tl.float16 == DTYPE and not _INTERPRETED:
        low, high = tl.inline_asm_elementwise(
            _INT8_PAIRS if tl.int8 == CODE else _E4M3_PAIRS, _TWO_OUTPUTS, [pairs], dtype=(tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low = pairs.to(tl.int8).to(CODE, bitcast=True).to(DTYPE)
        high = (pairs >> 8).to(tl.int8).to(CODE, bitcast=True).to(DTYPE)
    return low, high


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
    """The divisor of the weighted sum of values' codes: their scale is in it."""
    if SCALES == "head":
        total = total / tl.load(scales_ptr + num_kv_heads + kv_head)
    return total
