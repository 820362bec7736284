"""Codes of 4 and 8 bits in and out of bytes and words, on whatever device they are."""

from __future__ import annotations

import torch


def unpack_nibbles(data: torch.Tensor, high_first: bool = False) -> torch.Tensor:
    """uint8 [..., n] -> its nibbles, uint8 [..., 2 * n]; of a byte the low one first, or the high one."""
    nibbles = data & 15, data >> 4
    return torch.stack(nibbles[::-1] if high_first else nibbles, -1).flatten(-2)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """int32 [n, m] -> the first `count` codes of 4 or 8 bits of each row, uint8 [n, count], from the lowest bits on."""
    if words.stride(-1) != 1:
        words = words.clone(memory_format=torch.contiguous_format)
    data = words.view(torch.uint8)
    return (unpack_nibbles(data) if bits == 4 else data)[:, :count]


def exponents(codes: torch.Tensor) -> torch.Tensor:
    """The float32 powers of two of e8m0 codes, which files also store as uint8; 255 is NaN."""
    return codes.view(torch.float8_e8m0fnu).float()
