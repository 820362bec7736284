"""Upcasts in registers: quantized values become bfloat16 numbers, without their scales.

An upcast number is exact: bfloat16 represents integers up to 255 and all of e4m3. Table entries are rounded to bfloat16
once. Kernels apply scales to sums, in float32: to the sum of each group, or once to the whole sum.
"""

from __future__ import annotations

from functools import cache

import torch

from runtime.kernels.triton_language import constexpr, jit, tl

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# Instructions over four bytes, element by element; $n are bfloat16 pairs. A multiprocessor does half as many integer
# operations a cycle as others, so this code saves integer operations. A value becomes the low bits of a number with a
# fixed exponent (0x4300 is 128), in one operation for two values. A subtraction on the other units removes the 128.
_FP8 = """{
.reg .b16 a, b, c, d;
.reg .b32 x, y, p, q, r, s;
mov.b32 {a, b}, $2;
cvt.rn.f16x2.e4m3x2 x, a;
cvt.rn.f16x2.e4m3x2 y, b;
mov.b32 {a, b}, x;
mov.b32 {c, d}, y;
cvt.f32.f16 p, a;
cvt.f32.f16 q, b;
cvt.f32.f16 r, c;
cvt.f32.f16 s, d;
cvt.rn.bf16x2.f32 $0, q, p;
cvt.rn.bf16x2.f32 $1, s, r;
}"""
_INT8 = """{
.reg .b32 a, b, s;
prmt.b32 a, $2, 0, 0x4140;
prmt.b32 b, $2, 0, 0x4342;
lop3.b32 s, a, 0x00800080, 0xC300C300, 0xEA;
lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA;
add.rn.bf16x2 $0, a, s;
lop3.b32 s, b, 0x00800080, 0xC300C300, 0xEA;
lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
add.rn.bf16x2 $1, b, s;
}"""
# A nibble n becomes 128 + n. Sums start with the correction for the 128 (`negative_offset`).
_NIBBLES = """{
.reg .b32 a, b, c, d;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $2, c, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $3, d, 0x000F000F, 0x43004300, 0xEA;
}"""
# Sign, exponent and mantissa move to their places in bfloat16; the factor 2 ** 126 adjusts the exponent's bias.
_E2M1 = """{
.reg .b32 a, b, c, m;
mov.b32 m, 0x7E807E80;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
""" + "\n".join(
    f"""shl.b32 c, {source}, {12 - high};
and.b32 c, c, 0x80008000;
shl.b32 ${out}, {source}, {6 - high};
lop3.b32 ${out}, ${out}, 0x01C001C0, c, 0xEA;
mul.rn.bf16x2 ${out}, ${out}, m;"""
    for out, source, high in ((0, "a", 0), (1, "b", 0), (2, "a", 4), (3, "b", 4))
) + "\n}"  # fmt: skip


def _table_instructions(table: tuple[float, ...]) -> str:
    """Table lookups by byte permutations: low and high bytes for entries 0 to 7 and 8 to 15, then one half."""
    bits = torch.tensor(table).bfloat16().view(torch.int16).tolist()
    low, high = ([value >> shift & 255 for value in bits] for shift in (0, 8))

    def word(data: list[int], first: int) -> str:
        return hex(int.from_bytes(bytes(data[first : first + 4]), "little"))

    names = {f"{name}{i}": word(data, 4 * i) for name, data in (("l", low), ("h", high)) for i in range(4)}
    lines = ["{", ".reg .b32 w, p, s, m, x, y, " + ", ".join(names) + ";"]
    lines += [f"mov.b32 {name}, {value};" for name, value in names.items()]
    lines += ["and.b32 w, $4, 0x77777777;", "shr.u32 p, $4, 3;", "and.b32 p, p, 0x11111111;"]
    for out in (0, 1):
        if out:
            lines += ["shr.u32 w, w, 16;", "shr.u32 p, p, 16;"]
        lines += ["prmt.b32 m, 0xFF00, 0, p;"]
        for name, to in (("l", "x"), ("h", "y")):
            lines += [
                f"prmt.b32 {to}, {name}0, {name}1, w;",
                f"prmt.b32 s, {name}2, {name}3, w;",
                f"lop3.b32 {to}, m, s, {to}, 0xCA;",  # m ? s : to
            ]
        lines += [f"prmt.b32 ${out}, x, y, 0x6240;", f"prmt.b32 ${out + 2}, x, y, 0x7351;"]
    return "\n".join([*lines, "}"])


@cache
def upcast_instructions(encoding: str, table: tuple[float, ...]) -> str:
    """The instructions of `upcast_bytes` or `upcast_nibbles` on a GPU."""
    match encoding:
        case "fp8":
            return _FP8
        case "int8":
            return _INT8
        case "uint4" | "int4":
            return _NIBBLES
        case "e2m1":
            return _E2M1
        case _:
            return _table_instructions(table)


_ONE_OUTPUT = constexpr("=r,=r,r")
_TWO_OUTPUTS = constexpr("=r,=r,=r,=r,r")
_SMALLEST_NORMAL = constexpr(2.0**-126)
_OFFSETS = constexpr(("mov.b32 $0, 0xC308C308;", "mov.b32 $0, 0xC300C300;"))  # -136 and -128, twice each
_OFFSET_OUTPUT = constexpr("=r,r")


@jit
def upcast_bytes(values, LAYOUT: tl.constexpr, DTYPE: tl.constexpr):
    """8-bit values as numbers: bfloat16 on a GPU, DTYPE under the interpreter."""
    if LAYOUT.asm is not None:
        numbers = tl.inline_asm_elementwise(LAYOUT.asm, _ONE_OUTPUT, [values], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        numbers = values.to(DTYPE)
    return numbers


@jit
def upcast_nibbles(packed, LAYOUT: tl.constexpr, DTYPE: tl.constexpr):
    """The low and the high nibbles of bytes as numbers; integers come out larger by 128 (`negative_offset`)."""
    if LAYOUT.asm is not None:
        low, high = tl.inline_asm_elementwise(
            LAYOUT.asm, _TWO_OUTPUTS, [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low = _interpret_nibbles(packed & 15, LAYOUT).to(DTYPE)
        high = _interpret_nibbles(packed >> 4, LAYOUT).to(DTYPE)
    return low, high


@jit
def upcast_raw_nibbles(packed, LAYOUT: tl.constexpr, RAW: tl.constexpr):
    """The low and the high nibbles as `raw_instructions` return them, or as numbers of a table."""
    if RAW is not None:
        low, high = tl.inline_asm_elementwise(
            RAW, _TWO_OUTPUTS, [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = upcast_nibbles(packed, LAYOUT, tl.float32)
        if LAYOUT.encoding == "int4" or LAYOUT.encoding == "uint4":
            low, high = (low - 128) / 128 * _SMALLEST_NORMAL, (high - 128) / 128 * _SMALLEST_NORMAL
        elif LAYOUT.encoding == "e2m1":
            low, high = low * _SMALLEST_NORMAL, high * _SMALLEST_NORMAL
    return low, high


@jit
def side_by_side(low, high):
    """Both nibbles' planes [rows, plane] as the columns [rows, 2 * plane] of one product, without an instruction."""
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (low.shape[0], 2 * low.shape[1]))


@jit
def negative_offset(numbers, LAYOUT: tl.constexpr):
    """-136 for int4, else -128, in the shape and the register layout of `numbers`.

    A constant would get another register layout. The product would then read x in two layouts, and loads of x would no
    longer run ahead."""
    if LAYOUT.asm is not None:
        MOVE: tl.constexpr = _OFFSETS[0] if LAYOUT.encoding == "int4" else _OFFSETS[1]
        filled = tl.inline_asm_elementwise(MOVE, _OFFSET_OUTPUT, [numbers], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        filled = tl.full(numbers.shape, -136.0 if LAYOUT.encoding == "int4" else -128.0, numbers.dtype)
    return filled


@jit
def _interpret_nibbles(nibbles, LAYOUT: tl.constexpr):
    if LAYOUT.encoding == "uint4" or LAYOUT.encoding == "int4":
        numbers = nibbles.to(tl.float32) + 128
    else:
        numbers = tl.zeros(nibbles.shape, tl.float32)
        for i in tl.static_range(16):
            numbers = tl.where(nibbles == i, LAYOUT.table[i], numbers)
    return numbers
