"""Triton where it is installed; where it is not, kernels are never launched and only have to be importable."""

from __future__ import annotations

try:
    import triton.language as tl
    from triton import jit, next_power_of_2
except ImportError:
    tl = None

    def jit(fn):
        return fn

    def next_power_of_2(n: int) -> int:
        return 1 << (n - 1).bit_length()


__all__ = ["jit", "next_power_of_2", "tl"]
