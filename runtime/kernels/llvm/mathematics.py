"""Functions of float32 numbers, built from operations that round alike on every instruction set.

exp is within 2 units in the last place (Cephes' expf: a reduced argument and a polynomial)."""

from __future__ import annotations

from runtime.kernels.llvm.language import Value, absolute, f32, i32, number, u32, where

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # the high part has few digits: its products with n are exact
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_TO_INTEGER = 12582912.0  # 1.5 * 2 ** 23: a sum with it is a whole number, in its low bits
_LOWEST, _HIGHEST = -87.3, 88.3  # exp is 0 below and infinite above


def exp(x: Value) -> Value:
    """e to the power of x; exactly 1 for 0."""
    lanes = x.type.lanes
    moved = x * _LOG2_E + _TO_INTEGER
    n = moved - _TO_INTEGER
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    y = _polynomial(r, _EXP) * (r * r) + r + 1.0
    power = (moved.bitcast(u32(lanes)) << 23) + 0x3F800000  # 2 ** n
    y = y * power.bitcast(f32(lanes))
    return where(x < _LOWEST, 0.0, where(x > _HIGHEST, float("inf"), y))


def sigmoid(x: Value) -> Value:
    return 1.0 / (exp(0.0 - x) + 1.0)


# log(1 + z) = z - z^2 / 2 + z^3 * p(z): the coefficients of Cephes' logf, the highest power first.
_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_HALF_SQRT = 0.70710678118654752440


def log(x: Value) -> Value:
    """The natural logarithm of a positive, normal x, within 2 units in the last place."""
    lanes = x.type.lanes
    raw = x.bitcast(i32(lanes))
    exponent = (raw >> 23) - 126
    mantissa = ((raw & 0x7FFFFF) | 0x3F000000).bitcast(f32(lanes))  # 1/2 to 1
    is_low = mantissa < _HALF_SQRT
    z = where(is_low, mantissa + mantissa, mantissa) - 1.0
    power = where(is_low, exponent - 1, exponent).to(f32)
    square = z * z
    y = _polynomial(z, _LOG) * z * square + power * _LN2_LOW - square * 0.5
    return z + y + power * _LN2_HIGH


def tanh(x: Value) -> Value:
    size, square = absolute(x), x * x
    small = _polynomial(square, _TANH) * square * x + x
    large = 1.0 - 2.0 / (exp(size + size) + 1.0)
    negative = 0.0 - large
    return where(size < 0.625, small, where(x < 0.0, negative, large))


def _polynomial(x: Value, factors: tuple[float, ...]) -> Value:
    """The highest power's factor comes first."""
    y = number(factors[0], x.type)
    for factor in factors[1:]:
        y = y * x + factor
    return y
