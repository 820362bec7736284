"""Another bit order for 4-bit values, for which an upcast takes about half the instructions.

Four bytes are a word with eight values. Each of four operations moves two values' bits to their places in a bfloat16
pair. Mixtures use this order on a GPU; under the interpreter, bytes keep their order.
"""

from __future__ import annotations

from functools import cache

import torch

_PAIR_BITS = {"e2m1": (6, 7, 8, 15), "int": (0, 1, 2, 3)}  # places of a value's bits in bfloat16, from the lowest on

# For each value pair, a word's left rotation for each of these bits.
_ROTATIONS = {
    "e2m1": ((0, 0, 0, 0), (12, 12, 12, 12), (6, 6, 6, 6), (2, 10, 10, 10)),
    "int": ((0,) * 4, (28,) * 4, (24,) * 4, (20,) * 4),
}

# $4 is a word; $0 to $3 are columns 0 and 1, 2 and 3 in the low nibbles, then in the high ones. Values are smaller by
# 2 ** -126 (e2m1), or are an integer's bits: smaller by 2 ** -133, which bfloat16 still holds exactly.
_RAW_E2M1 = """.reg .b32 t, u;
and.b32 $0, $4, 0x81C081C0;
shf.l.wrap.b32 t, $4, $4, 12;
and.b32 $1, t, 0x81C081C0;
shl.b32 t, $4, 6;
and.b32 $2, t, 0x81C081C0;
shf.l.wrap.b32 t, $4, $4, 10;
shl.b32 u, $4, 2;
and.b32 u, u, 0x00400040;
lop3.b32 $3, t, 0x81808180, u, 0xEA;
"""
_RAW_INTEGER = """.reg .b32 t, u, v;
shr.u32 t, $4, 4;
shr.u32 u, $4, 8;
shr.u32 v, $4, 12;
and.b32 $0, $4, 0x000F000F;
and.b32 $1, t, 0x000F000F;
and.b32 $2, u, 0x000F000F;
and.b32 $3, v, 0x000F000F;
"""


def raw_instructions(encoding: str) -> str:
    """Instructions over a word for numbers that are smaller by 2 ** -126 (e2m1) or 2 ** -133 (integers)."""
    return "{\n" + (_RAW_E2M1 if encoding == "e2m1" else _RAW_INTEGER) + "}"


def word_instructions(encoding: str) -> str:
    """The instructions of `upcast_nibbles`: e2m1's values, or integers larger by 128."""
    if encoding == "e2m1":
        adjust = "\n".join(f"mul.rn.bf16x2 ${out}, ${out}, m;" for out in range(4))
        return "{\n.reg .b32 m;\nmov.b32 m, 0x7E807E80;\n" + _RAW_E2M1 + adjust + "\n}"
    return "{\n" + "".join(
        f"lop3.b32 {line[len('and.b32 ') : -1]}, 0x43004300, 0xEA;\n" if line.startswith("and") else line + "\n"
        for line in _RAW_INTEGER.splitlines()
    ) + "}"  # fmt: skip


def has_word_order(encoding: str) -> bool:
    return encoding in ("e2m1", "int4", "uint4")


def in_word_order(packed: torch.Tensor, encoding: str) -> torch.Tensor:
    """Bytes of two nibbles [N, K / 2] with their bits in this order."""
    words = packed.contiguous().view(torch.int32)
    out = torch.zeros_like(words)
    for distance, mask in _moves("e2m1" if encoding == "e2m1" else "int").items():
        moved = words << distance if distance >= 0 else words >> -distance
        out |= moved & mask
    return out.view(torch.uint8)


@cache
def _moves(kind: str) -> dict[int, int]:
    """Distance that bits move to the left -> their places afterwards, as a mask of int32."""
    masks: dict[int, int] = {}
    for pair, rotations in enumerate(_ROTATIONS[kind]):
        for half in (0, 1):
            first = 8 * (2 * (pair % 2) + half) + 4 * (pair // 2)  # the value's lowest bit in the bytes
            for bit, (place, rotation) in enumerate(zip(_PAIR_BITS[kind], rotations, strict=True)):
                target = (place + 16 * half - rotation) % 32
                distance = target - first - bit
                masks[distance] = masks.get(distance, 0) | 1 << target
    return {distance: mask - (mask >> 31 << 32) for distance, mask in masks.items()}
