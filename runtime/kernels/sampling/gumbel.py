"""Gumbel noise as a pure function of (seed, position, token id): no generator, no state, no order of evaluation (C4).

    key    64-bit seed and position -> two 32-bit words a row
    hash   (token id, key) -> 32 bits; the upper 23 are k
    u      (k + 1/2) / 2^23, exact in fp32, never 0 or 1
    noise  -log(-log1p(-u)): -log1p(-u) is an exponential variate, precise for small u, where the noise is largest

Words are int32 with wrap-around products and masked shifts, so every backend gets the same integers. The finaliser is
lowbias32 from the hash-prospector project. The second key word enters between its two rounds, so two rows never see
permutations of the same noise.
"""

from __future__ import annotations

import torch

from runtime.kernels.triton_language import jit, tl

_MUL_1 = 0x7FEB352D
_MUL_2 = 0x846CA68B - (1 << 32)  # fits int32
_GOLDEN = 0x9E3779B9 - (1 << 32)  # 2^32 / golden ratio: makes the key's two words differ


def _xor_shift(h: torch.Tensor, bits: int) -> torch.Tensor:
    """h ^= h >>> bits, in place."""
    return h.bitwise_xor_((h >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _keyed_hash(h: torch.Tensor, key: torch.Tensor | int) -> torch.Tensor:
    """lowbias32 in place, with `key` added in the middle."""
    _xor_shift(h, 16).mul_(_MUL_1).bitwise_xor_(key)
    return _xor_shift(_xor_shift(h, 15).mul_(_MUL_2), 16)


def noise_keys(
    seeds: torch.Tensor,  # [n] int64
    positions: torch.Tensor,  # [n] int32, the sampled token's, counted from the sequence's first
) -> torch.Tensor:
    """[2, n] int32: the two words of each row's key."""
    low, high = _low_word(seeds), _low_word(seeds >> 32)
    first = _keyed_hash(_keyed_hash(positions ^ low, 0) ^ high, _GOLDEN)
    return torch.stack((first, _keyed_hash(first ^ low, 0)))


def _low_word(x: torch.Tensor) -> torch.Tensor:
    x = x & 0xFFFFFFFF
    return torch.where(x >= 1 << 31, x - (1 << 32), x).to(torch.int32)


def noise_bits(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """k, int32 in [0, 2^23), for keys [2, ...] and int32 token_ids with shapes that broadcast."""
    hashed = _keyed_hash(token_ids ^ keys[0], keys[1])
    return (hashed >> 9).bitwise_and_((1 << 23) - 1)


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 noise, arguments as for `noise_bits`."""
    u = noise_bits(keys, token_ids).float().add_(0.5).mul_(2.0**-23)
    return u.neg_().log1p_().neg_().log_().neg_()


# ---- in kernels -----------------------------------------------------------------------------------------------------


@jit
def _shift_right(h, BITS: tl.constexpr):
    """A logical shift of int32."""
    return (h >> BITS) & ((1 << (32 - BITS)) - 1)


@jit
def hash_of_words(h, key):
    """`_keyed_hash`, with 0x846CA68B as an int32."""
    h = (h ^ _shift_right(h, 16)) * 0x7FEB352D
    h = h ^ key
    h = (h ^ _shift_right(h, 15)) * -0x7B935975
    return h ^ _shift_right(h, 16)


@jit
def noise_of_tokens(ids, position, low, high):
    """`gumbel_noise` of token ids [.] at a position, for a seed's two words.

    Triton lacks log1p. The inner logarithm is log(1 - u), which loses nothing: u is (k + 1/2) / 2^23, and 1 - u is
    exact in fp32."""
    first = hash_of_words(hash_of_words(position ^ low, 0) ^ high, -0x61C88647)
    second = hash_of_words(first ^ low, 0)
    bits = _shift_right(hash_of_words(ids ^ first, second), 9)
    rest = 1.0 - (bits.to(tl.float32) + 0.5) * (1.0 / (1 << 23))
    return -tl.log(-tl.log(rest))
