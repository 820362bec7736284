"""Keys and values as a cache stores them: in the compute dtype, or quantized to 8 bits. number = value * scale.

- float8_e4m3fn: each head has one scale for all keys and one for all values.
- int8: each token's key and value have a scale in each head, which follows from their largest component.

Attention always reads stored values, also of the step's own tokens. Chunks and prefix hits therefore do not change the
result.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from runtime.kernels.triton_language import INTERPRETED, constexpr, jit, tl

# Attention weights times value scales are float16. With 2 ** 6 as the largest weight, scales from 1e-6 to 1,000
# keep all their digits.
WEIGHT_LOG2 = constexpr(6.0)
# Instructions that turn four bytes into two float16 pairs. An int8 plus 128 becomes the low bits of a float16
# between 1,024 and 2,048, and 1,152 is subtracted.
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
MAX_VALUE = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


class KVLayer(NamedTuple):
    """One layer's cache."""

    # [2 (k, v), num_kv_heads, num_blocks, block_size, head_dim]; latents: [1, 1, num_blocks, block_size, size]
    values: torch.Tensor
    # e4m3: float32 [2, num_kv_heads]. int8: float16 [num_kv_heads, num_blocks, block_size, 2].
    scales: torch.Tensor | None = None
    group: int = 0  # the layer's group number (KVCacheSpec.groups)


def scaling(scales: torch.Tensor | None) -> Literal["none", "head", "token"]:
    """A scale's owner: nothing, a head, or a token in a head; the kernels' SCALES."""
    if scales is None:
        return "none"
    return "head" if scales.dim() == 2 else "token"


def store_kv_torch(
    numbers: torch.Tensor,  # [num_tokens, 2 * num_kv_heads, head_dim], all heads' keys first
    kv: torch.Tensor,
    scales: torch.Tensor | None,
    kv_index: torch.Tensor,  # [num_tokens] int64, block * block_size + offset
) -> None:
    """Write tokens' keys and values into a layer's cache. A number that is not finite stays not finite."""
    values, heads, dim = numbers.transpose(0, 1), 2 * kv.shape[1], kv.shape[-1]
    stored = kv.as_strided((heads, kv.shape[2] * kv.shape[3], dim), (kv.stride(1), dim, 1))
    if scales is not None:
        largest, wide = MAX_VALUE[kv.dtype], values.float()
        if scales.dim() == 2:
            wide = wide * (1 / scales.view(heads, 1, 1))
        else:
            own = (wide.abs().amax(-1) / largest).to(scales.dtype)
            token_scales = scales.as_strided((kv.shape[1], kv.shape[2] * kv.shape[3], 2), (scales.stride(0), 2, 1))
            token_scales[:, kv_index] = own.view(2, kv.shape[1], -1).permute(1, 2, 0)
            inverse = torch.where(own > 0, 1 / own.float(), 0.0)  # a zero head has scale 0
            wide = (wide * inverse.unsqueeze(-1)).round()
        values, stored = wide.clamp(-largest, largest).to(kv.dtype).view(torch.int8), stored.view(torch.int8)
    stored.index_copy_(1, kv_index, values)


def dequantize_kv(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Stored values times their scales, float32 [2, ..., num_kv_heads, length, head_dim].

    Scales are [2, num_kv_heads] or [..., num_kv_heads, length, 2]."""
    if scales.dim() == 2:
        return stored.float() * scales.view(2, *(1,) * (stored.dim() - 4), -1, 1, 1)
    return stored.float() * scales.movedim(-1, 0).unsqueeze(-1)


@jit
def round_to_integer(x):
    """Round numbers of a small magnitude, half to even."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2 ** 23: float32 is integral there


@jit
def upcast_pairs(pairs, STORED: tl.constexpr, DTYPE: tl.constexpr):
    """The low and high bytes in int16, values with dtype STORED, as DTYPE."""
    if tl.float16 == DTYPE and not _INTERPRETED:
        low, high = tl.inline_asm_elementwise(
            _INT8_PAIRS if tl.int8 == STORED else _E4M3_PAIRS, _TWO_OUTPUTS, [pairs], dtype=(tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low = pairs.to(tl.int8).to(STORED, bitcast=True).to(DTYPE)
        high = (pairs >> 8).to(tl.int8).to(STORED, bitcast=True).to(DTYPE)
    return low, high


@jit
def prepare_q(q, scales_ptr, kv_head, scale_log2, SCALES: tl.constexpr):
    """q times the score scale in log2 units, and with SCALES "head" times the key scale.

    q becomes float16, which represents all stored 8-bit values. A 16-bit q loses only digits below the scores'."""
    if SCALES == "head":
        scale_log2 *= tl.load(scales_ptr + kv_head)
    scaled = q.to(tl.float32) * scale_log2
    if q.dtype != tl.float32:
        scaled = scaled.to(tl.float16)
    return scaled


@jit
def finish_total(total, scales_ptr, kv_head, num_kv_heads, SCALES: tl.constexpr):
    """The divisor for the weighted sum of stored values, with their scale included."""
    if SCALES == "head":
        total = total / tl.load(scales_ptr + num_kv_heads + kv_head)
    return total
