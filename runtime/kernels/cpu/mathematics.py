"""Functions of float32 vectors, from operations that round alike on every CPU."""

from __future__ import annotations

from runtime.kernels.cpu.language import Value, f32, i32, maximum, minimum, rounded

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
