"""Products of quantized weights (interleaved_weight.py) with rows quantized to int16 or int8.

An output is a sum over groups: scale * (sum over chunks: activation scale * integer sum). It follows the column
order, and rounds each operation to float32. A row of x meets the same operations whatever the other rows are, so
results are batch-invariant to the bit. `int_product_torch` computes the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from runtime.kernels.cpu.linear.dot import Dot
from runtime.kernels.cpu.linear.product_memory import (
    QUADS,
    Block,
    IntRows,
    Results,
    RowTile,
    Scales,
    StoredRows,
    StoredWeight,
)
from runtime.kernels.cpu.linear.super_product import multiply_super_blocks
from runtime.kernels.cpu.linear.weight_form import COLUMNS, ROWS, WeightForm
from runtime.kernels.llvm.compiler import Target
from runtime.kernels.llvm.language import (
    F32s,
    Int,
    Value,
    Variable,
    f32,
    i64,
    loop,
    number,
    share,
    variable,
    zeros,
)

_MANY_ROWS = (4, 2, 1)  # numbers of x rows that share a read of the weight


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
    is_one_row: bool,
    adds: bool,  # adds to what `out` holds
    has_bias: bool,
) -> None:
    """Part i/n: a share of the weight's blocks, for all rows of x."""
    rows = StoredRows(*x, sizes.num_rows, sizes.num_chunks, limbs)
    results = Results(out, sizes.out_stride, bias if has_bias else None, adds)
    blocks = share(sizes.num_blocks, part, parts)
    multiply_blocks(target, form, weight, rows, results, blocks, number(0, i64), sizes.num_rows, is_one_row)


def multiply_blocks(
    target: Target,
    form: WeightForm,
    weight: StoredWeight,
    stored_rows: StoredRows,
    results: Results,
    blocks: tuple[Value, Value],  # begin and end
    first_row: Value,
    end_row: Value,
    is_one_row: bool,
) -> None:
    """Multiply some blocks of a weight with some rows."""
    if form.super_size:
        multiply_super_blocks(target, form, weight, stored_rows, results, blocks, first_row, end_row, is_one_row)
        return
    lanes, num_chunks = min(ROWS, target.vector_bytes // 4), stored_rows.num_chunks
    for block in loop(*blocks):
        row = variable(first_row)
        for tile in (1,) if is_one_row else _MANY_ROWS:
            last = end_row if tile == 1 else end_row - (tile - 1)
            for first in loop(row.now, last, tile):
                row.set(first + tile)
                rows = RowTile(stored_rows, first, tile, lanes)
                for half in range(ROWS // lanes):
                    own = Block(target, form, weight.values, block, half, lanes, num_chunks)
                    shared = Scales(form, *weight[1:], block, half, lanes, num_chunks)
                    for m, total in enumerate(_multiply(own, shared, rows, num_chunks)):
                        results.write(first + m, block * ROWS + half * lanes, total.now)


def _multiply(block: Block, scales: Scales, rows: RowTile, chunks: Value) -> list[Variable]:
    """A tile's sums: f32 [lanes] for each row of x."""
    form = block.form
    sums = [variable(zeros(f32(block.lanes))) for _ in range(rows.tile)]
    if form.group_size in (16, 32):
        for chunk in loop(0, chunks):
            _add_chunk(sums, block, scales, rows, chunk)
    else:
        per_group = form.group_size // COLUMNS if form.group_size else chunks
        for group in loop(0, chunks // per_group):
            _add_group(sums, block, scales, rows, group, per_group)
    return sums


def _add_chunk(sums: list[Variable], block: Block, scales: Scales, rows: RowTile, chunk: Value) -> None:
    """Add a chunk that is one group, or two groups of 16 columns."""
    form, quads = block.form, block.quads(chunk)
    halves = [0, 1] if form.group_size == 16 else [None]
    for half in halves:
        own = slice(0, QUADS) if half is None else slice(half * QUADS // 2, (half + 1) * QUADS // 2)
        scale, *minimums = scales.group_scales(chunk if half is None else chunk * 2 + half)
        for m, total in enumerate(sums):
            product, below = _of_row(block, rows, m, chunk, quads, own, half)
            total += scale * product
            for smallest in minimums:
                total.set(total - smallest * below())


def _add_group(
    sums: list[Variable], block: Block, scales: Scales, rows: RowTile, group: Value, chunks: Value | int
) -> None:
    """Add a group of several chunks."""
    products = [variable(zeros(f32(block.lanes))) for _ in sums]
    belows = [variable(zeros(f32(block.lanes))) for _ in sums] if block.form.has_minimum else []
    for chunk in loop(group * chunks, (group + 1) * chunks):
        quads = block.quads(chunk)
        for m, total in enumerate(products):
            product, below = _of_row(block, rows, m, chunk, quads, slice(0, QUADS), None)
            total += product
            if belows:
                belows[m] += below()
    scale, *minimums = scales.group_scales(group)
    for m, total in enumerate(sums):
        total += scale * products[m]
        for smallest in minimums:
            total.set(total - smallest * belows[m])


def _of_row(
    block: Block, rows: RowTile, m: int, chunk: Value, quads: list[Value], own: slice, half: int | None
) -> tuple[Value, Callable[[], Value]]:
    """The product of a chunk, or its half, with row m: its scale part and minimum part, f32 [lanes]."""
    dot = Dot(block.target, block.lanes, block.form.value_bits, rows.limbs)
    for quad in range(QUADS)[own]:
        dot.add(quads[quad], rows.quad(m, chunk, quad))
    whole, scale = dot.total(), rows.scale(m, chunk)
    if offset := block.form.offset - dot.moved:
        whole = whole - rows.sum(m, chunk, half) * offset
    return scale * whole.to(f32), lambda: scale * rows.sum(m, chunk, half).to(f32)
