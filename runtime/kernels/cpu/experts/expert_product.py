"""Products of the experts' weights with the rows that chose them, in one kernel for all experts.

Each part takes a share of every expert's blocks. A result has the bits of the expert's own product
(cpu/linear/int_product.py, cpu/linear/dense_product.py). `order_choices` makes `starts` and the row numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from runtime.kernels.cpu.linear.dense_product import DenseRows, multiply_dense_blocks, tiling
from runtime.kernels.cpu.linear.int_product import multiply_blocks
from runtime.kernels.cpu.linear.product_memory import TYPES, IntRows, Results, StoredRows, StoredWeight
from runtime.kernels.cpu.linear.weight_form import WeightForm
from runtime.kernels.llvm.compiler import Target
from runtime.kernels.llvm.language import (
    F32s,
    I32s,
    I64s,
    Int,
    Pointer,
    Value,
    f16,
    f32,
    loop,
    share,
    u8,
    when,
)


class ChosenRows(NamedTuple):
    """The rows that chose each expert."""

    starts: I32s  # [num_experts + 1]
    x_rows: I32s  # [all rows' choices]: rows in x, by expert
    out_rows: I32s  # [all rows' choices]: rows in out, by expert


def expert_int_product(
    addresses: I64s,  # [num_experts, 6]: a StoredWeight's tensors and the bias; zeros for other forms
    chosen: ChosenRows,
    x: IntRows,
    out: F32s,
    num_rows: Int,  # rows in x
    num_blocks: Int,  # blocks in one expert
    num_chunks: Int,
    out_stride: Int,
    part: Int,
    parts: Int,
    target: Target,
    num_experts: int,
    form: WeightForm,
    limbs: int,
    has_bias: bool,
) -> None:
    """Part i/n: a share of each weight's blocks, for its expert's rows."""
    rows, blocks = StoredRows(*x, num_rows, num_chunks, limbs, chosen.x_rows), share(num_blocks, part, parts)
    types = u8, TYPES[form.scale_dtype], TYPES[form.scale_dtype], f16, f16
    for first, end, own in _chosen(addresses, chosen.starts, num_experts, 6):
        weight = StoredWeight(*(own.load(i).address(type) for i, type in enumerate(types)))
        results = Results(out, out_stride, own.load(5).address(f32) if has_bias else None, numbers=chosen.out_rows)
        for is_one_row, condition in _cases(first, end):
            with when(condition):
                multiply_blocks(target, form, weight, rows, results, blocks, first, end, is_one_row)


def expert_dense_product(
    addresses: I64s,  # [num_experts, 2]: values and bias; zeros for other dtypes
    chosen: ChosenRows,
    x: F32s,
    out: F32s,
    num_blocks: Int,
    columns: Int,
    x_stride: Int,
    out_stride: Int,
    part: Int,
    parts: Int,
    target: Target,
    num_experts: int,
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    """As expert_int_product, of dense weights and float32 rows."""
    rows = DenseRows(x, x_stride, columns, chosen.x_rows)
    for first, end, own in _chosen(addresses, chosen.starts, num_experts, 2):
        values = own.load(0).address(TYPES[dtype])
        results = Results(out, out_stride, own.load(1).address(f32) if has_bias else None, numbers=chosen.out_rows)
        for is_one_row, condition in _cases(first, end):
            with when(condition):
                blocks = share(num_blocks, part, parts, tiling(target, dtype, is_one_row)[1][0])
                multiply_dense_blocks(target, dtype, is_one_row, values, rows, results, blocks, first, end)


def _cases(first: Value, end: Value) -> tuple[tuple[bool, Value], ...]:
    """One row, and many."""
    return (True, (end - first).equals(1)), (False, end - first > 1)


def _chosen(
    addresses: Pointer, starts: Pointer, num_experts: int, width: int
) -> Iterator[tuple[Value, Value, Pointer]]:
    """Begin and end of the rows for each expert that has rows and a weight, and its addresses."""
    for expert in loop(0, num_experts):
        first, end = (starts.load(expert + i).to(addresses.type) for i in range(2))
        own = addresses + expert * width
        with when((first < end) & (own.load(0) > 0)):
            yield first, end, own


def add_results(
    y: F32s,  # [rows * choices, >= columns], rows y_stride apart
    weights: F32s,  # [rows, choices]
    out: F32s,  # [rows, columns]
    num_rows: Int,
    columns: Int,  # a multiple of 16
    y_stride: Int,
    part: Int,
    parts: Int,
    choices: int,
    adds: bool,  # adds to what `out` holds
) -> None:
    """Each row's weighted sum of results, in its choices' order. Part i/n: a share of the rows."""
    begin, end = share(num_rows, part, parts)
    for row in loop(begin, end):
        own, target = y + row * choices * y_stride, out + row * columns
        factors = [weights.load(row * choices + choice).repeat(16) for choice in range(choices)]
        for at in loop(0, columns, 16):
            total = own.load(at, 16) * factors[0]
            for choice in range(1, choices):
                total = total + own.load(y_stride * choice + at, 16) * factors[choice]
            target.store(at, target.load(at, 16) + total if adds else total)
