"""Products of quantized weights (interleaved_weight.py) with rows quantized to int16 or int8.

An output is a sum over groups: scale * (sum over chunks: activation scale * integer sum). It follows the column
order, and rounds each operation to float32. A row of x meets the same operations whatever the other rows are, so
results are batch-invariant to the bit. `int_product_torch` computes the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from runtime.kernels.cpu.linear.dot import Dot, e2m1_values, repeated_quad
from runtime.kernels.cpu.linear.weight_form import COLUMNS, QUAD, ROWS, WeightForm
from runtime.kernels.llvm.compiler import Target
from runtime.kernels.llvm.language import (
    F16s,
    F32s,
    I8s,
    I32s,
    Int,
    Pointer,
    Type,
    U8s,
    Value,
    Variable,
    bf16,
    f16,
    f32,
    i8,
    i32,
    i64,
    loop,
    number,
    share,
    u8,
    u32,
    variable,
    zeros,
)

TYPES: dict[torch.dtype, Type] = {
    torch.float16: f16,
    torch.bfloat16: bf16,
    torch.float32: f32,
    torch.uint8: u8,
    torch.int8: i8,
}
_QUADS = COLUMNS // QUAD
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

    limbs: I8s  # [rows, K / 32, limbs, 32]
    scales: F32s  # [rows, K / 32]
    sums: I32s  # [rows, K / 32, 2]: sums of half chunks


class ProductSizes(NamedTuple):
    """The sizes of a product."""

    num_rows: Int
    num_blocks: Int
    num_chunks: Int
    out_stride: Int


def int_product(
    weight: StoredWeight,
    x: IntRows,
    bias: F32s,  # [blocks * 16], read if has_bias
    out: F32s,  # [rows, >= blocks * 16], rows out_stride apart
    sizes: ProductSizes,
    part: Int,
    parts: Int,
    target: Target,
    form: WeightForm,
    limbs: int,
    tiles: tuple[int, ...],  # x row counts that share a read of the weight, falling to 1
    adds: bool,  # adds to what `out` holds
    has_bias: bool,
) -> None:
    """Part i/n: a share of the weight's blocks, for all rows of x."""
    rows = StoredRows(*x, sizes.num_chunks, limbs)
    results = Results(out, sizes.out_stride, bias if has_bias else None, adds)
    blocks = share(sizes.num_blocks, part, parts)
    multiply_blocks(target, form, weight, rows, results, blocks, number(0, i64), sizes.num_rows, tiles)


class StoredRows(NamedTuple):
    """The memory of quantized rows."""

    x: Pointer
    scales: Pointer
    sums: Pointer
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


def row_number(numbers: Pointer | None, index: Value) -> Value:
    """The row at an index in a row list."""
    return index if numbers is None else numbers.load(index).to(i64)


def multiply_blocks(
    target: Target,
    form: WeightForm,
    weight: StoredWeight,
    stored_rows: StoredRows,
    results: Results,
    blocks: tuple[Value, Value],  # begin and end
    first_row: Value,
    end_row: Value,
    tiles: tuple[int, ...],
) -> None:
    """Multiply some blocks of a weight with some rows."""
    lanes, num_chunks = min(ROWS, target.vector_bytes // 4), stored_rows.num_chunks
    for block in loop(*blocks):
        row = variable(first_row)
        for tile in tiles:
            last = end_row if tile == 1 else end_row - (tile - 1)
            for first in loop(row.now, last, tile):
                row.set(first + tile)
                rows = _Rows(stored_rows, first, tile, lanes)
                for half in range(ROWS // lanes):
                    own = _Block(target, form, weight.values, block, half, lanes, num_chunks)
                    shared = _Scales(form, *weight[1:], block, half, lanes, num_chunks)
                    sums = _multiply(own, shared, rows)
                    at = block * ROWS + half * lanes
                    for m, total in enumerate(sums):
                        place = row_number(results.numbers, first + m) * results.stride + at
                        result = total.now
                        if results.bias is not None:
                            result = result + results.bias.load(at, lanes)
                        if results.adds:
                            result = results.out.load(place, lanes) + result
                        results.out.store(place, result)


class _Rows:
    """A tile of quantized x rows."""

    def __init__(self, stored: StoredRows, first: Value, tile: int, lanes: int) -> None:
        self.tile, self.num_chunks, self.limbs, self.lanes = tile, stored.num_chunks, stored.limbs, lanes
        numbers = [row_number(stored.numbers, first + m) for m in range(tile)]
        bytes_of_row = stored.num_chunks * (COLUMNS * stored.limbs)
        self._x = [stored.x.of(i32) + number * bytes_of_row // 4 for number in numbers]
        self._scales = [stored.scales + number * stored.num_chunks for number in numbers]
        self._sums = [stored.sums + number * stored.num_chunks * 2 for number in numbers]

    def quad(self, m: int, chunk: Value, quad: int) -> list[Value]:
        """Activations of each limb, repeated for all lanes."""
        at = chunk * (self.limbs * _QUADS) + quad
        return [repeated_quad(self._x[m].load(at + limb * _QUADS), self.lanes) for limb in range(self.limbs)]

    def scale(self, m: int, chunk: Value) -> Value:
        return self._scales[m].load(chunk).repeat(self.lanes)

    def sum(self, m: int, chunk: Value, half: int | None) -> Value:
        """A chunk's integer sum, or one half's."""
        first, second = (self._sums[m].load(chunk * 2 + i) for i in range(2))
        return (first + second if half is None else (first, second)[half]).repeat(self.lanes)


class _Block:
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
            return [self._vector(at, j).bitcast(u8(4 * self.lanes)) for j in range(_QUADS)]
        nibbles = [self._vector(at, j) for j in range(_QUADS // 2)]
        low = [v >> shift & 0x0F0F0F0F for v in nibbles for shift in (0, 4)]
        if bits > 4:
            each, per = bits - 4, 8 // (bits - 4)
            planes = [self._vector(at, _QUADS // 2 + i) for i in range(each)]
            mask = 0x10101010 if each == 1 else 0x30303030
            for j in range(_QUADS):
                shift = 4 - j % per * each
                plane = planes[j // per]
                low[j] = low[j] | ((plane << shift if shift > 0 else plane >> -shift) & mask)
        values = [v.bitcast(u8(4 * self.lanes)) for v in low]
        return [e2m1_values(each, self.target) for each in values] if self.form.is_e2m1 else values

    def _vector(self, at: Pointer, index: int) -> Value:
        return at.load(index * ROWS * QUAD, 4 * self.lanes).bitcast(u32(self.lanes))


class _Scales:
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

    def of_super(self, index: Value) -> list[Value]:
        """A super group's factors: for scales, and perhaps for minimums."""
        pointers = self._supers[: 2 if self.form.has_minimum else 1]
        return [p.load(index * ROWS, self.lanes).to(f32) for p in pointers]

    def of_group(self, index: Value, factors: list[Value]) -> list[Value]:
        """The scale of a group, and perhaps the minimum."""
        pointers = (self._scales, self._minimums)[: 2 if self.form.has_minimum else 1]
        columns = self.form.group_size or COLUMNS
        for pointer in pointers:  # the scales for the prefetched values
            pointer.prefetch((index + _AHEAD // self.form.chunk_bytes * COLUMNS // columns) * ROWS)
        numbers = [p.load(index * ROWS, self.lanes).to(f32) for p in pointers]
        return [n * f for n, f in zip(numbers, factors, strict=True)] if factors else numbers


def _multiply(block: _Block, scales: _Scales, rows: _Rows) -> list[Variable]:
    """A tile's sums: f32 [lanes] for each row of x."""
    form, chunks = block.form, rows.num_chunks
    sums = [variable(zeros(f32(block.lanes))) for _ in range(rows.tile)]
    if form.super_size:
        per = form.super_size // COLUMNS
        for index in loop(0, chunks // per):
            factors = scales.of_super(index)
            for chunk in loop(index * per, (index + 1) * per):
                _add_chunk(sums, block, scales, rows, chunk, factors)
    elif form.group_size in (16, 32):
        for chunk in loop(0, chunks):
            _add_chunk(sums, block, scales, rows, chunk, [])
    else:
        per_group = form.group_size // COLUMNS if form.group_size else chunks
        for group in loop(0, chunks // per_group):
            _add_group(sums, block, scales, rows, group, per_group)
    return sums


def _add_chunk(
    sums: list[Variable], block: _Block, scales: _Scales, rows: _Rows, chunk: Value, factors: list[Value]
) -> None:
    """Add a chunk that is one group, or two groups of 16 columns."""
    form, quads = block.form, block.quads(chunk)
    halves = [0, 1] if form.group_size == 16 else [None]
    for half in halves:
        own = slice(0, _QUADS) if half is None else slice(half * _QUADS // 2, (half + 1) * _QUADS // 2)
        scale, *minimums = scales.of_group(chunk if half is None else chunk * 2 + half, factors)
        for m, total in enumerate(sums):
            product, below = _of_row(block, rows, m, chunk, quads, own, half)
            total += scale * product
            for smallest in minimums:
                total.set(total - smallest * below())


def _add_group(
    sums: list[Variable], block: _Block, scales: _Scales, rows: _Rows, group: Value, chunks: Value | int
) -> None:
    """Add a group of several chunks."""
    products = [variable(zeros(f32(block.lanes))) for _ in sums]
    belows = [variable(zeros(f32(block.lanes))) for _ in sums] if block.form.has_minimum else []
    for chunk in loop(group * chunks, (group + 1) * chunks):
        quads = block.quads(chunk)
        for m, total in enumerate(products):
            product, below = _of_row(block, rows, m, chunk, quads, slice(0, _QUADS), None)
            total += product
            if belows:
                belows[m] += below()
    scale, *minimums = scales.of_group(group, [])
    for m, total in enumerate(sums):
        total += scale * products[m]
        for smallest in minimums:
            total.set(total - smallest * belows[m])


def _of_row(
    block: _Block, rows: _Rows, m: int, chunk: Value, quads: list[Value], own: slice, half: int | None
) -> tuple[Value, Callable[[], Value]]:
    """The product of a chunk, or its half, with row m: its scale part and minimum part, f32 [lanes]."""
    dot = Dot(block.target, block.lanes, block.form.value_bits, rows.limbs)
    for quad in range(_QUADS)[own]:
        dot.add(quads[quad], rows.quad(m, chunk, quad))
    whole, scale = dot.total(), rows.scale(m, chunk)
    if offset := block.form.offset - dot.moved:
        whole = whole - rows.sum(m, chunk, half) * offset
    return scale * whole.to(f32), lambda: scale * rows.sum(m, chunk, half).to(f32)
