"""Products of dense weights with float32 rows.

A weight keeps a dtype of 16 bits if that is exact: a checkpoint in bfloat16 is stored so, and multiplied in float32.
Blocks of 16 outputs lie column after column (pack.py).

An output is the sum of sums over SPAN columns each, in the order of the columns. A row of x meets the same operations
whatever the other rows are, so results are batch-invariant to the bit."""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.cpu.linear.product_memory import TYPES, Results, row_number
from runtime.kernels.cpu.linear.weight_form import ROWS
from runtime.kernels.llvm.compiler import Target
from runtime.kernels.llvm.language import (
    F32s,
    Int,
    Pointer,
    U8s,
    Value,
    Variable,
    array,
    f32,
    fused,
    i64,
    loop,
    minimum,
    number,
    share,
    variable,
    zeros,
)

SPAN = 256  # columns per sum
MOST_BLOCKS = 3  # blocks per tile
_UNROLLED = 4  # columns per compiled step
_LINE = 64  # bytes
# Blocks that one row multiplies at once, and bytes that are prefetched ahead, by bytes per element.
_BLOCKS_OF_ROW, _AHEAD = {2: 1, 4: 4}, {2: 8192, 4: 4096}


class DenseArguments(NamedTuple):
    """What `dense_product` reads and writes."""

    values: U8s  # [blocks, K, 16], some dtype
    x: F32s  # [rows, K], rows x_stride apart
    bias: F32s  # [blocks * 16], read if has_bias
    converted: F32s  # [parts, MOST_BLOCKS, K, 16], memory for blocks, if `converts`
    out: F32s  # [rows, >= blocks * 16], rows out_stride apart
    num_rows: Int
    num_blocks: Int
    columns: Int
    x_stride: Int
    out_stride: Int


def dense_product(
    given: DenseArguments,
    part: Int,
    parts: Int,
    target: Target,
    dtype: torch.dtype,
    is_one_row: bool,
    converts: bool,  # turns blocks to float32 before their first product: faster with many rows
    adds: bool,  # adds to what `out` holds
    has_bias: bool,
) -> None:
    """Part i/n: a share of the weight's blocks, for all rows of x."""
    assert not (converts and is_one_row), "`converted` has no room for the blocks of one row"
    _, blocks_at_once = tiling(target, dtype, is_one_row)
    blocks = share(given.num_blocks, part, parts, blocks_at_once[0])
    memory = given.converted + part * (MOST_BLOCKS * ROWS) * given.columns if converts else None
    results = Results(given.out, given.out_stride, given.bias if has_bias else None, adds)
    weight, rows = given.values.of(TYPES[dtype]), DenseRows(given.x, given.x_stride, given.columns)
    multiply_dense_blocks(
        target, dtype, is_one_row, weight, rows, results, blocks, number(0, i64), given.num_rows, memory
    )


class DenseRows(NamedTuple):
    """The memory of rows."""

    x: Pointer
    stride: Value
    columns: Value
    numbers: Pointer | None = None  # numbers of the rows that are multiplied; None for all rows in order


def multiply_dense_blocks(
    target: Target,
    dtype: torch.dtype,
    is_one_row: bool,
    values: Pointer,
    stored_rows: DenseRows,
    results: Results,
    blocks: tuple[Value, Value],  # begin and end
    first_row: Value,
    end_row: Value,
    converted: Pointer | None = None,  # memory for a tile's blocks in float32; None to multiply them as they are
) -> None:
    """Multiply some blocks of a weight with some rows."""
    rows_at_once, blocks_at_once = tiling(target, dtype, is_one_row)
    block = variable(blocks[0])
    totals = array(f32, rows_at_once[0] * blocks_at_once[0] * ROWS)
    for wide in blocks_at_once:
        for first_block in loop(block.now, blocks[1] - (wide - 1), wide):
            block.set(first_block + wide)
            weight = _Blocks(values, first_block, stored_rows.columns, wide)
            if converted is not None:
                weight = weight.converted(converted)
            row = variable(first_row)
            for high in rows_at_once:
                for first in loop(row.now, end_row - (high - 1), high):
                    row.set(first + high)
                    numbers = [row_number(stored_rows.numbers, first + m) for m in range(high)]
                    weight.multiply([stored_rows.x + n * stored_rows.stride for n in numbers], totals, is_one_row)
                    for m in range(high):
                        place = row_number(results.numbers, first + m) * results.stride
                        _store(results, place, first_block, totals + m * wide * ROWS, wide)


def _store(results: Results, place: Value, first_block: Value, totals: Pointer, wide: int) -> None:
    """Store a row's results; `place` is its first output's."""
    for b in range(wide):
        at = (first_block + b) * ROWS
        result = totals.load(b * ROWS, ROWS)
        if results.bias is not None:
            result = result + results.bias.load(at, ROWS)
        if results.adds:
            result = results.out.load(place + at, ROWS) + result
        results.out.store(place + at, result)


def tiling(target: Target, dtype: torch.dtype, is_one_row: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A tile's numbers of x rows and blocks; both fall to 1."""
    if is_one_row:
        most = _BLOCKS_OF_ROW[dtype.itemsize]
        return (1,), (most, 1) if most > 1 else (1,)
    return ((9, 8, 4, 2, 1), (MOST_BLOCKS, 1)) if target.vector_bytes == 64 else ((6, 2, 1), (1,))


class _Blocks:
    """Neighbouring blocks of a weight."""

    def __init__(self, values: Pointer, first: Value, columns: Value, count: int) -> None:
        self.columns, self._bytes = columns, values.type.bytes
        self._blocks = [values + (first + b) * columns * ROWS for b in range(count)]

    def converted(self, memory: Pointer) -> _Blocks:
        """These blocks in float32."""
        copy = _Blocks(memory, number(0, i64), self.columns, len(self._blocks))
        for column in loop(0, self.columns):
            self._prefetch(column, 1)
            for source, target in zip(self._blocks, copy._blocks, strict=True):
                target.store(column * ROWS, source.load(column * ROWS, ROWS).to(f32))
        return copy

    def multiply(self, rows: list[Pointer], totals: Pointer, is_one_row: bool) -> None:
        """The sums for all pairs (row, block), row after row."""
        count = len(rows) * len(self._blocks)
        for i in range(count):
            totals.store(i * ROWS, zeros(f32(ROWS)))
        for begin in loop(0, self.columns, SPAN):
            end, sums = minimum(begin + SPAN, self.columns), [variable(zeros(f32(ROWS))) for _ in range(count)]
            unrolled = _UNROLLED if is_one_row else 1  # more than 1 moves many rows' sums out of registers
            whole = begin + (end - begin) // unrolled * unrolled
            for column in loop(begin, whole, unrolled):
                if is_one_row:
                    self._prefetch(column, unrolled)
                for i in range(unrolled):
                    self._add(rows, column + i, sums)
            if unrolled > 1:
                for column in loop(whole, end):
                    self._add(rows, column, sums)
            for i, total in enumerate(sums):
                totals.store(i * ROWS, totals.load(i * ROWS, ROWS) + total.now)

    def _prefetch(self, column: Value, count: int) -> None:
        """Prefetch the lines that lie ahead of these columns."""
        for block in self._blocks:
            for line in range(0, count * ROWS * self._bytes, _LINE):
                block.prefetch(column * ROWS + (_AHEAD[self._bytes] + line) // self._bytes)

    def _add(self, rows: list[Pointer], column: Value, sums: list[Variable]) -> None:
        weights = [block.load(column * ROWS, ROWS).to(f32) for block in self._blocks]
        for m, row in enumerate(rows):
            repeated = row.load(column).repeat(ROWS)
            for b, weight in enumerate(weights):
                total = sums[m * len(weights) + b]
                total.set(fused(weight, repeated, total.now))
