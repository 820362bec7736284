"""Largest magnitudes and bounded numbers in kernels, which keep NaN.

`tl.max`, `tl.maximum` and `tl.clamp` return the other operand of a NaN. A row that is not finite would become plausible
numbers, and the sampler could not refuse its token (C9). These functions compile to `max.NaN` and `min.NaN`.
"""

from __future__ import annotations

from runtime.kernels.triton_language import INTERPRETED, constexpr, jit, tl

_INTERPRETED = constexpr(INTERPRETED)


@jit
def larger(a, b):
    """The larger of two numbers; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def smaller(a, b):
    """The smaller of two numbers; NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def largest_magnitude(x, AXIS: tl.constexpr):
    """The largest magnitude along an axis; NaN if one number is."""
    return tl.reduce(tl.abs(x), AXIS, larger)


@jit
def within(x, LARGEST: tl.constexpr):
    """x clamped to a magnitude of LARGEST; NaN stays."""
    return tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@jit
def to_e4m3(x):
    """Round numbers within 448 to e4m3, ties to even; NaN stays."""
    if _INTERPRETED:
        # The interpreter's cast neither carries into the exponent nor keeps NaN. It is exact for e4m3 values.
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        exact = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)  # 1.5 * 2 ** 14: steps of 2 ** -9
        values = exact.to(tl.float8e4nv).to(tl.int8, bitcast=True)
        values = tl.where(x == x, values, 127).to(tl.int8).to(tl.float8e4nv, bitcast=True)
    else:
        values = x.to(tl.float8e4nv)
    return values
