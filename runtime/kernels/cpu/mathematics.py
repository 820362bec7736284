"""Functions of float32 vectors, from operations that round alike on every CPU."""

from __future__ import annotations

from runtime.kernels.cpu.language import Value, f32, i32, maximum, minimum, rounded, where

_LOG2_E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# exp(r) = 1 + r + r^2 * p(r) for |r| <= ln(2) / 2: the coefficients of Cephes' expf, the highest power first.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOWEST, _HIGHEST = -87.0, 88.0


def exp(x: Value) -> Value:
    """e ** x within 2 units in the last place; below -87 about 1e-38, above 88 about 1.6e38. NaN stays NaN."""
    lanes = x.type.lanes
    bounded = minimum(maximum(x, _LOWEST), _HIGHEST)
    power = rounded(bounded * _LOG2_E)
    r = bounded - power * _LN2_HIGH - power * _LN2_LOW
    p = r * _EXP[0] + _EXP[1]
    for coefficient in _EXP[2:]:
        p = p * r + coefficient
    result = p * r * r + r + 1.0
    return result * ((power.to(i32) + 127) << 23).bitcast(f32(lanes)) + (x - x)


def sigmoid(x: Value) -> Value:
    """1 / (1 + e ** -x)."""
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
    mantissa = ((raw & 0x7FFFFF) | 0x3F000000).bitcast(f32(lanes))  # in [1/2, 1)
    is_low = mantissa < _HALF_SQRT
    z = where(is_low, mantissa + mantissa, mantissa) - 1.0
    power = where(is_low, exponent - 1, exponent).to(f32)
    p = z * _LOG[0] + _LOG[1]
    for coefficient in _LOG[2:]:
        p = p * z + coefficient
    square = z * z
    y = p * z * square + power * _LN2_LOW - square * 0.5
    return z + y + power * _LN2_HIGH
