"""A KV cache's elements (stored_kv.py), as CPU kernels load them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from runtime.kernels.llvm.language import (
    Pointer,
    Type,
    Value,
    bf16,
    f16,
    f32,
    i8,
    joined,
    loop,
    number,
    u8,
    u32,
    where,
    zeros,
)

LANES = 16  # every vector's lanes; the same on all CPUs, and so is each sum's order
_TYPES = {
    torch.float32: f32,
    torch.bfloat16: bf16,
    torch.float16: f16,
    torch.int8: i8,
    torch.float8_e4m3fn: u8,
}


@dataclass(frozen=True, slots=True)
class KVForm:
    """The form of one layer's cache."""

    dtype: torch.dtype
    head_dim: int
    block_size: int
    is_latent: bool = False  # values are the keys; attention's caller takes the results' first elements

    @property
    def type(self) -> Type:
        return _TYPES[self.dtype]

    @property
    def has_token_scales(self) -> bool:
        return self.dtype == torch.int8

    @property
    def has_head_scales(self) -> bool:
        return self.dtype == torch.float8_e4m3fn

    @property
    def num_vectors(self) -> int:
        """Vectors that hold the numbers of a head."""
        return -(-self.head_dim // LANES)

    def load(self, pointer: Pointer, vector: int) -> Value:
        """Return one of a head's vectors, float32 [LANES]; zeros behind the last element."""
        raw = load_part(pointer, vector * LANES, min(LANES, self.head_dim - vector * LANES))
        return _of_e4m3(raw) if self.has_head_scales else raw.to(f32)


def vectors(count: int) -> Iterator[tuple[Any, int]]:
    """A compiled loop over the vectors in `count` elements: each vector's first element and length."""
    whole, rest = divmod(count, LANES)
    if whole:
        for first in loop(0, whole * LANES, LANES):
            yield first, LANES
    if rest:
        yield whole * LANES, rest


def load_part(pointer: Pointer, offset: int, count: int) -> Value:
    """[LANES]: `count` numbers in memory, then zeros."""
    parts: list[Value] = []
    done = 0
    while done < count:
        size = 1 << (count - done).bit_length() - 1
        parts.append(pointer.load(offset + done, size))
        done += size
    while done < LANES:  # part sizes fall and then rise: equal neighbours are joined
        size = done & -done
        parts.append(zeros(pointer.type(size)))
        done += size
    while len(parts) > 1:
        for i in range(len(parts) - 1):
            if parts[i].type.lanes == parts[i + 1].type.lanes:
                parts[i : i + 2] = [_pair(parts[i], parts[i + 1])]
                break
    return parts[0]


def store_part(pointer: Pointer, offset: int, value: Value, count: int) -> None:
    """Store the first `count` lanes."""
    done = 0
    while done < count:
        size = 1 << (count - done).bit_length() - 1
        pointer.store(offset + done, value if size == value.type.lanes else value.lanes(range(done, done + size)))
        done += size


def _pair(a: Value, b: Value) -> Value:
    if a.type.lanes > 1:
        return joined(a, b)
    return joined(a.repeat(2), b.repeat(2)).lanes([0, 2])


def _of_e4m3(raw: Value) -> Value:
    """The values of e4m3 bytes: 4 exponent bits, 3 mantissa bits."""
    lanes = raw.type.lanes
    wide = raw.to(u32)
    size, sign = wide & 0x7F, (wide & 0x80) << 24
    normal = (size << 20) + (120 << 23)
    small = (size.to(f32) * 2.0**-9).bitcast(u32(lanes))
    bits = where(size < 8, small, normal)
    bits = where(size.equals(0x7F), number(0x7FC00000, u32(lanes)), bits)
    return (bits | sign).bitcast(f32(lanes))
