"""Embedding rows: dequantized from a quantized embedding (interleaved_weight.py), or copied from a dense one."""

from __future__ import annotations

from runtime.kernels.cpu.linear.dot import e2m1_values
from runtime.kernels.cpu.linear.product_memory import TYPES
from runtime.kernels.cpu.linear.weight_form import COLUMNS, QUAD, ROWS, WeightForm
from runtime.kernels.llvm.language import (
    F16s,
    F32s,
    Float,
    I64s,
    Int,
    Pointer,
    U8s,
    Value,
    f32,
    loop,
    share,
)


def lookup(
    values: U8s,
    scales: F32s,  # form.scale_dtype, like minimums
    minimums: F32s,
    super_scales: F16s,
    super_minimums: F16s,
    ids: I64s,  # [rows]
    out: F32s,  # [rows, columns]
    num_rows: Int,
    columns: Int,
    factor: Float,
    part: Int,
    parts: Int,
    form: WeightForm,
) -> None:
    """out[i] = factor * row ids[i]. Part i/n: a share of the rows."""
    begin, end = share(num_rows, part, parts)
    for row in loop(begin, end):
        token = ids.load(row)
        block, lane = token // ROWS, token % ROWS
        for chunk in loop(0, columns // COLUMNS):
            at = values + ((block * (columns // COLUMNS) + chunk) * form.chunk_bytes + lane * QUAD)
            for quad in range(COLUMNS // QUAD):
                column = chunk * COLUMNS + quad * QUAD
                numbers = _quad(form, at, quad).to(f32) - float(form.offset)
                scale, minimum = (
                    _of_group(form, pointer, supers, block, lane, column, columns)
                    for pointer, supers in ((scales, super_scales), (minimums, super_minimums))
                )
                numbers = numbers * scale
                if form.has_minimum:
                    numbers = numbers - minimum
                out.store(row * columns + column, numbers * factor)


def dense_lookup(
    table: F32s,  # [size, columns]
    ids: I64s,  # [rows]
    out: F32s,  # [rows, columns]
    num_rows: Int,
    columns: Int,
    factor: Float,
    part: Int,
    parts: Int,
) -> None:
    """out[i] = factor * row ids[i]. Part i/n: a share of the rows."""
    begin, end = share(num_rows, part, parts)
    for row in loop(begin, end):
        source, target = table + ids.load(row) * columns, out + row * columns
        whole = columns // ROWS * ROWS
        for lanes, first, last in ((ROWS, 0, whole), (1, whole, columns)):
            for column in loop(first, last, lanes):
                target.store(column, source.load(column, lanes) * factor)


def _quad(form: WeightForm, at: Pointer, quad: int) -> Value:
    """Four values of a row: u8 [4]."""
    vector = ROWS * QUAD
    if form.bits == 8:
        return at.load(quad * vector, QUAD)
    low = at.load(quad // 2 * vector, QUAD)
    low = low >> 4 if quad % 2 else low & 15
    if form.bits == 4:
        return e2m1_values(low) if form.is_e2m1 else low
    each = form.bits - 4
    per = 8 // each
    plane = at.load((4 + quad // per) * vector, QUAD) >> (quad % per * each)
    return low | (plane & (1 << each) - 1) << 4


def _of_group(
    form: WeightForm, pointer: Pointer, supers: Pointer, block: Value, lane: Value, column: Value, columns: Value
) -> Value:
    """The scale or the minimum of a column, f32."""

    def place(size: int) -> Value:
        if not size:
            return block * ROWS + lane
        return (block * (columns // size) + column // size) * ROWS + lane

    found = pointer.of(TYPES[form.scale_dtype]).load(place(form.group_size)).to(f32)
    return found * supers.load(place(form.super_size)).to(f32) if form.super_size else found
