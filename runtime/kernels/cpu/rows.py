"""Kernels between the products of a layer: one pass over float32 rows. Also what products share with them."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.base.model.decoder_spec import ACTIVATION_LIMIT
from runtime.kernels.llvm.language import (
    F32s,
    Float,
    Int,
    Pointer,
    Value,
    f32,
    loop,
    number,
    share,
    square_root,
    variable,
    where,
    zeros,
)
from runtime.kernels.llvm.mathematics import sigmoid, tanh

_LANES = 16
_GELU_SCALE = 1.5957691216057308  # 2 * sqrt(2 / pi)
_CLAMPED_SCALE = 1.702


def norm_rows(
    x: F32s,  # [rows, columns], rows x_stride apart; columns are a multiple of 16
    weight: F32s,  # [columns]
    out: F32s,  # [rows, columns], rows out_stride apart; may be x
    num_rows: Int,
    columns: Int,
    x_stride: Int,
    out_stride: Int,
    eps: Float,
    part: Int,
    parts: Int,
    adds: bool,
) -> None:
    """out = norm(x) * weight; with `adds`, added to it. Part i/n: a share of the rows."""
    for row in loop(*share(num_rows, part, parts)):
        own, to = x + row * x_stride, out + row * out_stride
        factor = inverse_rms(own, columns, eps).repeat(_LANES)
        for at in loop(0, columns, _LANES):
            normed = own.load(at, _LANES) * factor * weight.load(at, _LANES)
            to.store(at, to.load(at, _LANES) + normed if adds else normed)


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
    """out = activation(gate), times `up` if there is one. Part i/n: a share of the rows."""
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
    """x = cap * tanh(x / cap). Part i/n: a share of the columns."""
    begin, end = share(columns, part, parts, _LANES)
    for row in loop(0, num_rows):
        own = x + (row * x_stride + begin)
        for at, lanes in _vectors(end - begin):
            own.store(at, tanh(own.load(at, lanes) / cap) * cap)


def multiply_rows(x: F32s, factor: F32s, count: Int, part: Int, parts: Int) -> None:
    """Multiply all elements with one factor. Part i/n: a share of the numbers."""
    begin, end = share(count, part, parts, _LANES)
    for at, lanes in _vectors(end - begin):
        x.store(begin + at, x.load(begin + at, lanes) * factor.load(0))


def clear(x: F32s, count: Int, part: Int, parts: Int) -> None:
    """Write zeros. Part i/n: a share of the numbers."""
    begin, end = share(count, part, parts, _LANES)
    for at, lanes in _vectors(end - begin):
        x.store(begin + at, zeros(x.type(lanes)))


def inverse_rms(x: Pointer, columns: Value, eps: Value) -> Value:
    """1 / sqrt(mean square + eps) for a row with a multiple of 16 columns."""
    total = variable(zeros(f32(_LANES)))
    for at in loop(0, columns, _LANES):
        values = x.load(at, _LANES)
        total += values * values
    mean = total.now.reduce(lambda a, b: a + b) / columns.to(f32)
    return 1.0 / square_root(mean + eps)


def gated_by(gate: Value, up: Value | None, activation: str) -> Value:
    """The activation of numbers, times `up` if there is one."""
    if activation == "swiglu_clamped":
        assert up is not None, "this activation has a gate"
        limit, least = (number(sign * ACTIVATION_LIMIT, gate.type) for sign in (1, -1))
        gate = where(gate > limit, limit, gate)
        up = where(up > limit, limit, where(up < least, least, up)) + 1.0
    value = activated(gate, activation)
    return value if up is None else value * up


def activated(x: Value, activation: str) -> Value:
    """x * sigmoid(z), see runtime/kernels/norm/gated_activation.py."""
    if activation == "swiglu_clamped":
        return x * sigmoid(x * _CLAMPED_SCALE)
    z = x if activation == "silu" else (x * x * x * 0.044715 + x) * _GELU_SCALE
    return x * sigmoid(z)


def _vectors(count: Value) -> Iterator[tuple[Value, int]]:
    """Compiled loops over `count` numbers: the first number of a vector, and its lanes."""
    whole = count // _LANES * _LANES
    for at in loop(0, whole, _LANES):
        yield at, _LANES
    for at in loop(whole, count):
        yield at, 1
