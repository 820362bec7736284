"""A product's memory: quantized rows, results, and each weight block's values and scales."""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.cpu.linear.dot import e2m1_values, repeated_quad
from runtime.kernels.cpu.linear.weight_form import COLUMNS, QUAD, ROWS, WeightForm
from runtime.kernels.llvm.compiler import Target
from runtime.kernels.llvm.language import (
    F16s,
    F32s,
    I8s,
    I16s,
    Pointer,
    Type,
    U8s,
    Value,
    bf16,
    f16,
    f32,
    i8,
    i16,
    i32,
    i64,
    u8,
    u32,
)

TYPES: dict[torch.dtype, Type] = {
    torch.float16: f16,
    torch.bfloat16: bf16,
    torch.float32: f32,
    torch.uint8: u8,
    torch.int8: i8,
}
QUADS = COLUMNS // QUAD
_AHEAD = 8192  # value bytes: two pages, since the processor itself prefetches within a page


class StoredWeight(NamedTuple):
    """The memory of a weight."""

    values: U8s
    scales: F32s  # form.scale_dtype, like minimums
    minimums: F32s
    super_scales: F16s
    super_minimums: F16s


class IntRows(NamedTuple):
    """The memory of rows, as `quantize_rows` writes them."""

    limbs: I8s  # [K / 32, rows, limbs, 32]
    scales: F32s  # [K / 32, rows]
    sums: I16s  # [K / 32, rows, limbs, 2]: sums of half chunks


class StoredRows(NamedTuple):
    """The memory of quantized rows."""

    x: Pointer
    scales: Pointer
    sums: Pointer
    num_rows: Value  # stored rows
    num_chunks: Value
    limbs: int
    numbers: Pointer | None = None  # numbers of the rows that are multiplied; None for all rows in order


class Results(NamedTuple):
    """The memory of the results."""

    out: Pointer
    stride: Value
    bias: Pointer | None
    adds: bool = False
    numbers: Pointer | None = None  # row numbers in `out`; None for all rows in order

    def write(self, row: Value, at: Value, result: Value) -> None:
        """Write some outputs of a row, from number `at` on."""
        place = row_number(self.numbers, row) * self.stride + at
        if self.bias is not None:
            result = result + self.bias.load(at, result.type.lanes)
        if self.adds:
            result = self.out.load(place, result.type.lanes) + result
        self.out.store(place, result)


def row_number(numbers: Pointer | None, index: Value) -> Value:
    """The row at an index in a row list."""
    return index if numbers is None else numbers.load(index).to(i64)


class RowTile:
    """A tile of quantized x rows."""

    def __init__(self, stored: StoredRows, first: Value, tile: int, lanes: int) -> None:
        self.tile, self.limbs, self.lanes, self._stored = tile, stored.limbs, lanes, stored
        self._numbers = [first]  # row numbers; only the first if rows are neighbours
        if stored.numbers is not None:
            self._numbers = [row_number(stored.numbers, first + m) for m in range(tile)]

    def quad(self, m: int, chunk: Value, quad: int) -> list[Value]:
        """Activations of each limb, repeated for all lanes."""
        row = self._at(self._stored.x.of(i32), m, chunk, self.limbs * QUADS)
        return [repeated_quad(row.load(limb * QUADS + quad), self.lanes) for limb in range(self.limbs)]

    def scale(self, m: int, chunk: Value) -> Value:
        return self._at(self._stored.scales, m, chunk, 1).load().repeat(self.lanes)

    def sum(self, m: int, chunk: Value, half: int | None) -> Value:
        """A chunk's integer sum, or one half's."""
        row = self._at(self._stored.sums, m, chunk, 2 * self.limbs)
        halves = [0, 1] if half is None else [half]
        first, *more = (
            sum((row.load(2 * limb + i).to(i32) for i in halves[1:]), row.load(2 * limb + halves[0]).to(i32))
            for limb in range(self.limbs)
        )
        return ((first << 8) + more[0] if more else first).repeat(self.lanes)

    def half_sums(self, m: int, chunk: Value, limb: int) -> Value:
        """The limb's two sums over half chunks, repeated for all lanes: i16 [2 * lanes]."""
        pair = self._at(self._stored.sums.of(i32), m, chunk, self.limbs).load(limb)
        return pair.repeat(self.lanes).bitcast(i16(2 * self.lanes))

    def _at(self, memory: Pointer, m: int, chunk: Value, elements: int) -> Pointer:
        """The place of a row's chunk, if chunks have this many elements."""
        if self._stored.numbers is None:
            return memory + (chunk * self._stored.num_rows + self._numbers[0]) * elements + m * elements
        return memory + (chunk * self._stored.num_rows + self._numbers[m]) * elements


class Block:
    """The values in one weight block, or in some of its rows."""

    def __init__(
        self, target: Target, form: WeightForm, values: Pointer, block: Value, half: int, lanes: int, chunks: Value
    ) -> None:
        self.target, self.form, self.lanes = target, form, lanes
        self._values = values + (block * chunks * form.chunk_bytes + half * lanes * QUAD)

    def quads(self, chunk: Value) -> list[Value]:
        """The eight quads of a chunk: u8 [4 * lanes]."""
        bits, at = self.form.bits, self._values + chunk * self.form.chunk_bytes
        for line in range(0, self.form.chunk_bytes, 64):
            at.prefetch(_AHEAD + line)
        if bits == 8:
            return [self._vector(at, j).bitcast(u8(4 * self.lanes)) for j in range(QUADS)]
        nibbles = [self._vector(at, j) for j in range(QUADS // 2)]
        low = [v >> shift & 0x0F0F0F0F for v in nibbles for shift in (0, 4)]
        if bits > 4:
            each, per = bits - 4, 8 // (bits - 4)
            planes = [self._vector(at, QUADS // 2 + i) for i in range(each)]
            mask = 0x10101010 if each == 1 else 0x30303030
            for j in range(QUADS):
                shift = 4 - j % per * each
                plane = planes[j // per]
                low[j] = low[j] | ((plane << shift if shift > 0 else plane >> -shift) & mask)
        values = [v.bitcast(u8(4 * self.lanes)) for v in low]
        return [e2m1_values(each, self.target) for each in values] if self.form.is_e2m1 else values

    def _vector(self, at: Pointer, index: int) -> Value:
        return at.load(index * ROWS * QUAD, 4 * self.lanes).bitcast(u32(self.lanes))


class Scales:
    """The scales and minimums in one weight block."""

    def __init__(
        self,
        form: WeightForm,
        scales: Pointer,
        minimums: Pointer,
        super_scales: Pointer,
        super_minimums: Pointer,
        block: Value,
        half: int,
        lanes: int,
        chunks: Value,
    ) -> None:
        self.form, self.lanes = form, lanes
        columns = chunks * COLUMNS
        groups = block * (columns // form.group_size) if form.group_size else block
        self._scales, self._minimums = (
            p.of(TYPES[form.scale_dtype]) + (groups * ROWS + half * lanes) for p in (scales, minimums)
        )
        supers = block * (columns // form.super_size) if form.super_size else block
        self._supers = [p + (supers * ROWS + half * lanes) for p in (super_scales, super_minimums)]

    def super_factors(self, index: Value) -> list[Value]:
        """A super group's factors: for scales, and perhaps for minimums."""
        pointers = self._supers[: 2 if self.form.has_minimum else 1]
        return [p.load(index * ROWS, self.lanes).to(f32) for p in pointers]

    def group_scales(self, index: Value) -> list[Value]:
        """The scale of a group, and perhaps the minimum, as floats."""
        return [stored.to(f32) for stored in self.stored(index)]

    def stored(self, index: Value) -> list[Value]:
        """The scale of a group, and perhaps the minimum, as they are stored."""
        pointers = (self._scales, self._minimums)[: 2 if self.form.has_minimum else 1]
        columns = self.form.group_size or COLUMNS
        for pointer in pointers:  # the scales for the prefetched values
            pointer.prefetch((index + _AHEAD // self.form.chunk_bytes * COLUMNS // columns) * ROWS)
        return [p.load(index * ROWS, self.lanes) for p in pointers]
