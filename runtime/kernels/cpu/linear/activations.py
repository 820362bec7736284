"""Activation rows for a product, perhaps quantized: after a norm, or after a gated activation.

A span of 32 or 256 columns has a scale, its largest magnitude over 32,512 (or 127 for int8), so elements err by at
most that magnitude over 65,024. An element is two int8 limbs, 256 * high + low. A row that is not finite remains so.
`quantize_rows_torch` computes the same integers."""

from __future__ import annotations

from runtime.kernels.cpu.linear.int_product_torch import LARGEST, SMALLEST_MAGNITUDE
from runtime.kernels.cpu.linear.product_memory import IntRows
from runtime.kernels.cpu.linear.weight_form import COLUMNS
from runtime.kernels.cpu.rows import gated_by, inverse_rms
from runtime.kernels.llvm.language import (
    F32s,
    Float,
    Int,
    Pointer,
    Value,
    absolute,
    array,
    f32,
    i8,
    i16,
    i32,
    joined,
    loop,
    number,
    rounded,
    share,
    variable,
    where,
    zeros,
)

_LANES = 16


def quantize_rows(
    x: F32s,  # [rows, columns], rows x_stride apart; with a gate [rows, 2 * columns]
    norm_weight: F32s,  # [columns], read if there is a norm
    out: IntRows,
    num_rows: Int,
    columns: Int,
    x_stride: Int,
    eps: Float,
    part: Int,
    parts: Int,
    num_limbs: int,
    span: int,  # columns that share a scale
    has_norm: bool,
    activation: str,  # silu, gelu_tanh, swiglu_clamped, or empty
    gated: bool,
) -> None:
    """Part i/n: a share of the rows."""
    per = span // COLUMNS
    prepared = array(f32, span)
    begin, end = share(num_rows, part, parts)
    for row in loop(begin, end):
        own = x + row * x_stride
        factor = inverse_rms(own, columns, eps) if has_norm else None
        for first in loop(0, columns // COLUMNS, per):
            largest = variable(zeros(i32(_LANES)))
            for at in loop(0, span, _LANES):
                values = _prepared(own, first * COLUMNS + at, columns, factor, norm_weight, activation, gated)
                prepared.store(at, values)
                largest.set(_larger(largest.now, absolute(values).bitcast(i32(_LANES))))
            bound = _bounded(largest.now)
            inverse = (number(LARGEST[8 * num_limbs], f32) / bound).repeat(_LANES)
            for chunk in loop(0, per):
                index = (first + chunk) * num_rows + row
                out.scales.store(index, bound / LARGEST[8 * num_limbs])
                pair = [prepared.load(chunk * COLUMNS + half * _LANES, _LANES) for half in range(2)]
                numbers = joined(*(rounded(values * inverse).to(i32) for values in pair))
                for limb, part_of in enumerate(_limbs(numbers, num_limbs)):
                    at = index * num_limbs + limb
                    out.limbs.store(at * COLUMNS, part_of.to(i8))
                    for half, own_half in enumerate(part_of.split(2)):
                        out.sums.store(at * 2 + half, own_half.reduce(lambda a, b: a + b).to(i16))


def float_rows(
    x: F32s,  # quantize_rows's argument
    norm_weight: F32s,
    out: F32s,  # [rows, columns]
    num_rows: Int,
    columns: Int,
    x_stride: Int,
    eps: Float,
    part: Int,
    parts: Int,
    has_norm: bool,
    activation: str,
    gated: bool,
) -> None:
    """Do the same as quantize_rows, without the rounding. Part i/n: a share of the rows."""
    begin, end = share(num_rows, part, parts)
    for row in loop(begin, end):
        own = x + row * x_stride
        factor = inverse_rms(own, columns, eps) if has_norm else None
        for at in loop(0, columns, _LANES):
            out.store(row * columns + at, _prepared(own, at, columns, factor, norm_weight, activation, gated))


def _prepared(
    row: Pointer, at: Value, columns: Value, factor: Value | None, norm_weight: Pointer, activation: str, gated: bool
) -> Value:
    """Numbers of a row, after the norm or the activation."""
    values = row.load(at, _LANES)
    if factor is not None:
        values = values * factor.repeat(_LANES) * norm_weight.load(at, _LANES)
    if activation:
        values = gated_by(values, row.load(columns + at, _LANES) if gated else None, activation)
    return values


def _larger(a: Value, b: Value) -> Value:
    return where(a > b, a, b)


def _bounded(magnitudes: Value) -> Value:
    """The largest magnitude, compared as bits, so that NaN is the largest; at least 2 ** -100."""
    largest = magnitudes.reduce(_larger).bitcast(f32)
    return where(largest < SMALLEST_MAGNITUDE, number(SMALLEST_MAGNITUDE, f32), largest)


def _limbs(numbers: Value, num_limbs: int) -> list[Value]:
    """The numbers in int8 limbs, the high first, as int32."""
    if num_limbs == 1:
        return [numbers]
    high = (numbers + 128) >> 8
    return [high, numbers - (high << 8)]
