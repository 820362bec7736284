"""Weights that stay codes on a GPU: how they lie there, and how kernels turn codes into bfloat16.

Codes of 8 bits lie as the weight does, [N, K]. Of 4 bits a byte holds two columns of a row that are `plane` columns
apart: of every 2 * plane columns the low nibbles hold the first half, the high ones the second. A product multiplies
the two planes one after the other, so that no instruction puts neighbouring columns together again.

A decoded number is exact: whole numbers of a magnitude up to 255 and e4m3 are numbers of bfloat16, entries of a table
are rounded to it once. Scales are applied to sums, in float32: to those of each group of columns, or once to all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from runtime.kernels.triton_language import INTERPRETED, constexpr, jit, tl

MAX_GROUP = 128  # columns that share a scale; of wider groups the scale is repeated
_ROW_BYTES = 512  # of a row of scales no multiple: the rows of a step's groups would share memory channels


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [N, K] as codes."""

    shape: tuple[int, int]
    form: str  # fp8 | int8 | uint4 | int4 | e2m1 | table: what codes are (int4: from 0 on, 8 stands for 0)
    codes: torch.Tensor  # [N, K] float8_e4m3fn or int8; uint8 [N, K / 2], of `pack_planes`
    scales: torch.Tensor  # float32 [groups, at least N / scale_rows], or [1, N] of whole rows
    minimums: torch.Tensor | None = None  # like scales: number = code * scale - minimum
    group: int = 0  # columns that share a scale, 16, 32, 64 or 128; 0: all
    scale_rows: int = 1  # rows that do
    table: tuple[float, ...] = ()

    @property
    def plane(self) -> int:
        return plane_of(self.group) if self.codes.dtype == torch.uint8 else 0

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scales, self.minimums) if t is not None)


def plane_of(group: int) -> int:
    """Columns that lie between the two nibbles of a byte: a step's two planes are of one group, of one each, or of two
    where groups are narrower than what the matrix units read of bytes."""
    return 32 if group in (16, 32) else 64


def quantized_weight(
    form: str,
    codes: torch.Tensor,  # as `QuantizedWeight` has them
    scales: torch.Tensor,  # float32 [ceil(N / scale_rows), ceil(K / group) or 1]
    minimums: torch.Tensor | None = None,
    *,
    group: int = 0,  # 16, 32, 64 or a multiple of 128; 0: all
    scale_rows: int = 1,
    table: tuple[float, ...] = (),
) -> QuantizedWeight:
    """A weight as kernels read it."""
    num_rows, size_in = len(codes), codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)
    shared = [scales] if minimums is None else [scales, minimums]
    if group > MAX_GROUP or (minimums is not None and not group):  # which multiply sums of x, that groups alone have
        num_groups = -(-size_in // MAX_GROUP)
        repeats = group // MAX_GROUP or num_groups
        shared = [tensor.repeat_interleave(repeats, 1)[:, :num_groups] for tensor in shared]
        group = MAX_GROUP
    scales, *more = map(_beside, shared)
    return QuantizedWeight(
        (num_rows, size_in), form, codes, scales, more[0] if more else None, group, scale_rows, table
    )  # fmt: skip


def _beside(scales: torch.Tensor) -> torch.Tensor:
    """float32 [groups, rows], rows of which are no multiple of 512 bytes apart."""
    count = scales.shape[0]
    padded = -(-count // 4) * 4
    if padded * 4 % _ROW_BYTES == 0 and scales.shape[1] > 1:
        padded += 32
    return F.pad(scales.float().t(), (0, padded - count)).contiguous()


def pack_planes(codes: torch.Tensor, plane: int) -> torch.Tensor:
    """uint8 [N, K] from 0 to 15 -> uint8 [N, K / 2]; K is a multiple of 2 * plane."""
    low, high = codes.reshape(len(codes), -1, 2, plane).unbind(2)
    packed: torch.Tensor = (low | high << 4).reshape(len(codes), -1)
    return packed


def unpack_planes(packed: torch.Tensor, plane: int) -> torch.Tensor:
    """`pack_planes`, undone."""
    blocks = packed.view(len(packed), -1, 1, plane)
    return torch.cat((blocks & 15, blocks >> 4), 2).reshape(len(packed), -1)


def dequantize(weight: QuantizedWeight) -> torch.Tensor:
    """The numbers [N, K] in float32: decoded as kernels do, and scaled."""
    num_rows, size_in = weight.shape
    codes = unpack_planes(weight.codes, weight.plane) if weight.plane else weight.codes
    if weight.form in ("table", "e2m1"):
        values = torch.tensor(weight.table, device=codes.device).bfloat16().float()[codes.int()]
    else:
        values = codes.float() - (8 if weight.form == "int4" else 0)

    def spread(shared: torch.Tensor) -> torch.Tensor:
        per_row = shared.t().repeat_interleave(weight.scale_rows, 0)[:num_rows]
        return per_row.repeat_interleave(weight.group, 1)[:, :size_in] if weight.group else per_row

    numbers = values * spread(weight.scales)
    return numbers if weight.minimums is None else numbers - spread(weight.minimums)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# Instructions over four bytes, element by element: $n are pairs of bfloat16. The multiprocessor does half as many
# whole-number operations as others a cycle, so those are what is saved: a code becomes the low bits of a number whose
# exponent is fixed (0x4300 is 128), one operation for two codes, and a subtraction on the other units takes that off.
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
# Of a nibble n, 128 + n: sums begin with what this adds too much (`negative_offset`).
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
# Sign, exponent and mantissa go where bfloat16 has them; 2 ** 126 makes up for the exponents' distance.
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
    """Lookups by byte permutations: low and high bytes of the entries 0 to 7 and 8 to 15, and a choice between them."""
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


def instructions(weight: QuantizedWeight) -> str | None:
    """The instructions of `decode` and `upcast_nibbles` on a GPU; None where kernels are interpreted."""
    if INTERPRETED:
        return None
    match weight.form:
        case "fp8":
            return _FP8
        case "int8":
            return _INT8
        case "uint4" | "int4":
            return _NIBBLES
        case "e2m1":
            return _E2M1
        case "table":
            return _table_instructions(weight.table)
    return None


ONE_OUTPUT = constexpr("=r,=r,r")
OFFSETS = constexpr(("mov.b32 $0, 0xC308C308;", "mov.b32 $0, 0xC300C300;"))  # -136 and -128, twice each
OFFSET_OUTPUT = constexpr("=r,r")
TWO_OUTPUTS = constexpr("=r,=r,=r,=r,r")


@jit
def decode(codes, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of 8 bits as numbers of the type, which is bfloat16 unless kernels are interpreted."""
    if ASM is not None:
        numbers = tl.inline_asm_elementwise(ASM, ONE_OUTPUT, [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        numbers = codes.to(DTYPE)
    return numbers


@jit
def upcast_nibbles(packed, FORM: tl.constexpr, TABLE: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """The low and the high nibbles of bytes as numbers of the type, as `decode` has it."""
    if ASM is not None:
        low, high = tl.inline_asm_elementwise(
            ASM, TWO_OUTPUTS, [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low = _upcast_nibbles_plainly(packed & 15, FORM, TABLE).to(DTYPE)
        high = _upcast_nibbles_plainly(packed >> 4, FORM, TABLE).to(DTYPE)
    return low, high


@jit
def negative_offset(numbers, FORM: tl.constexpr, ASM: tl.constexpr):
    """-136 for int4, else -128, in the layout in which a product takes `numbers`: of constants it chooses another, and
    then x has two and is no longer read ahead."""
    if ASM is not None:
        MOVE: tl.constexpr = OFFSETS[0] if FORM == "int4" else OFFSETS[1]
        filled = tl.inline_asm_elementwise(MOVE, OFFSET_OUTPUT, [numbers], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        filled = tl.full(numbers.shape, -136.0 if FORM == "int4" else -128.0, numbers.dtype)
    return filled


@jit
def _upcast_nibbles_plainly(nibbles, FORM: tl.constexpr, TABLE: tl.constexpr):
    if FORM == "uint4" or FORM == "int4":
        values = nibbles.to(tl.float32) + 128
    else:
        values = tl.zeros(nibbles.shape, tl.float32)
        for i in tl.static_range(16):
            values = tl.where(nibbles == i, TABLE[i], values)
    return values


def kernel_options(weight: QuantizedWeight) -> dict[str, Any]:
    """The constants of a kernel that reads the weight."""
    table = tuple(torch.tensor(weight.table).bfloat16().tolist()) if INTERPRETED else ()
    return {
        "FORM": weight.form, "TABLE": table, "ASM": instructions(weight), "PLANE": weight.plane,
        "GROUP": weight.group, "SCALE_ROWS": weight.scale_rows, "SCALE_STRIDE": weight.scales.shape[-1],
        "MINIMUMS": weight.minimums is not None,
    }  # fmt: skip
