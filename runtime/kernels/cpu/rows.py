"""Kernels between the products of a layer: one pass over float32 rows."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.kernels.cpu.linear.activations import gated_by, inverse_rms
from runtime.kernels.llvm.language import F32s, Float, Int, Value, loop, share, zeros
from runtime.kernels.llvm.mathematics import tanh

_LANES = 16


def norm_in_place(
    x: F32s,  # [rows, columns], rows x_stride apart; columns are a multiple of 16
    weight: F32s,  # [columns]
    num_rows: Int,
    columns: Int,
    x_stride: Int,
    eps: Float,
    part: Int,
    parts: Int,
) -> None:
    """x = norm(x) * weight. Part i of n: a share of the rows."""
    for row in loop(*share(num_rows, part, parts)):
        own = x + row * x_stride
        factor = inverse_rms(own, columns, eps).repeat(_LANES)
        for at in loop(0, columns, _LANES):
            own.store(at, own.load(at, _LANES) * factor * weight.load(at, _LANES))


def activate_rows(
    gate: F32s,  # [rows, columns], rows gate_stride apart
    up: F32s,  # [rows, columns], rows up_stride apart; read if has_up
    out: F32s,  # [rows, columns]
    num_rows: Int,
    columns: Int,
    gate_stride: Int,
    up_stride: Int,
    part: Int,
    parts: Int,
    activation: str,
    has_up: bool,
) -> None:
    """out = activation(gate), times `up` if there is one. Part i of n: a share of the rows."""
    for row in loop(*share(num_rows, part, parts)):
        for at, lanes in _vectors(columns):
            factor = up.load(row * up_stride + at, lanes) if has_up else None
            out.store(row * columns + at, gated_by(gate.load(row * gate_stride + at, lanes), factor, activation))


def cap_rows(
    x: F32s,  # [rows, columns], rows x_stride apart
    num_rows: Int,
    columns: Int,
    x_stride: Int,
    cap: Float,
    part: Int,
    parts: Int,
) -> None:
    """x = cap * tanh(x / cap). Part i of n: a share of the columns."""
    begin, end = share(columns, part, parts, _LANES)
    for row in loop(0, num_rows):
        own = x + (row * x_stride + begin)
        for at, lanes in _vectors(end - begin):
            own.store(at, tanh(own.load(at, lanes) / cap) * cap)


def multiply_rows(x: F32s, factor: F32s, count: Int, part: Int, parts: Int) -> None:
    """Multiply all numbers with one. Part i of n: a share of the numbers."""
    begin, end = share(count, part, parts, _LANES)
    for at, lanes in _vectors(end - begin):
        x.store(begin + at, x.load(begin + at, lanes) * factor.load(0))


def clear(x: F32s, count: Int, part: Int, parts: Int) -> None:
    """Write zeros. Part i of n: a share of the numbers."""
    begin, end = share(count, part, parts, _LANES)
    for at, lanes in _vectors(end - begin):
        x.store(begin + at, zeros(x.type(lanes)))


def _vectors(count: Value) -> Iterator[tuple[Value, int]]:
    """Compiled loops over `count` numbers: the first number of a vector, and its lanes."""
    whole = count // _LANES * _LANES
    for at in loop(0, whole, _LANES):
        yield at, _LANES
    for at in loop(whole, count):
        yield at, 1
