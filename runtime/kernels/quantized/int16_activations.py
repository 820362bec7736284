"""Rows of activations as whole numbers of 16 bits, cut into two digits of 8 bits for the matrix units, made together
with the operation before a linear layer.

A row's scale is its largest magnitude over the largest number, so that it depends on no other row. Rounding errs at
most 1/65,024 of that magnitude.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.kernels.magnitudes import larger, largest_magnitude
from runtime.kernels.norm.gated_activation import Activation
from runtime.kernels.quantized.fp8_activations import load_row, wide_rows
from runtime.kernels.triton_language import constexpr, jit, next_power_of_2, tl, use_pdl

_LARGEST = constexpr(32512.0)  # 127 * 256
_SMALLEST = constexpr(2.0**-100)  # magnitude that a row is taken to have, so that zeros have a scale
_MAGIC = constexpr(12582912.0)  # 1.5 * 2 ** 23: what is added to it is rounded, to the low bits of the sum
_MAGIC_BITS = constexpr(0x4B400000)


class Int16Activations(NamedTuple):
    """Numbers [num_rows, K] as (256 * high + low) * scale of the row."""

    digits: torch.Tensor  # [2 * num_rows, K] int8: the high digits of a row, then its low ones
    scales: torch.Tensor  # [num_rows] float32
    sums: torch.Tensor | None = None  # [ceil(K / group), num_rows] float32: of the whole numbers of each group

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        high, low = self.digits.double().view(len(self.scales), 2, -1).unbind(1)
        return ((256 * high + low) * self.scales[:, None]).to(dtype)


def quantize_int16_torch(
    x: torch.Tensor,  # [num_rows, K]; with a gated activation [num_rows, 2 * K]
    norm_weight: torch.Tensor | None = None,  # of an RMS norm, which comes first
    eps: float = 0.0,
    activation: Activation | None = None,
    gated: bool = True,
    group: int = 0,  # columns of a sum; 0: no sums
) -> Int16Activations:
    """x, its norm or its gated activation, rounded from float32 to whole numbers."""
    wide = wide_rows(x, norm_weight, eps, activation, gated)
    largest = wide.abs().amax(1, keepdim=True).clamp_min(2.0**-100)
    numbers = (wide * (32512.0 / largest)).round()
    high = torch.floor((numbers + 128) / 256)
    digits = torch.stack((high, numbers - 256 * high), 1).to(torch.int8).flatten(0, 1)
    sums = None
    if group:
        sums = F.pad(numbers, (0, -numbers.shape[1] % group)).unflatten(1, (-1, group)).sum(2).t().contiguous()
    return Int16Activations(digits, largest[:, 0] / 32512.0, sums)


@jit
def _quantize_int16_kernel(
    x_ptr,  # [num_rows, K], or [num_rows, 2 * K] if GATED; rows x_stride apart
    norm_ptr,  # [K], read if NORM
    digits_ptr,  # [num_rows, 2, K] contiguous
    scales_ptr,  # [num_rows]
    sums_ptr,  # [ceil(K / GROUP), num_rows], written if GROUP
    num_rows,
    x_stride,
    K,
    eps,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least K
    PDL: tl.constexpr,
):
    """Program i: row i."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = load_row(x_ptr + row * x_stride, norm_ptr, cols, K, eps, NORM, ACTIVATION, GATED, PDL)
    largest = larger(largest_magnitude(x, 0), _SMALLEST)
    rounded = x * (_LARGEST / largest) + _MAGIC
    numbers = rounded.to(tl.int32, bitcast=True) - _MAGIC_BITS
    high = (numbers + 128) >> 8
    digits = digits_ptr + row * (2 * K) + cols
    tl.store(digits, high.to(tl.int8), mask=cols < K)
    tl.store(digits + K, (numbers - (high << 8)).to(tl.int8), mask=cols < K)
    tl.store(scales_ptr + row, largest / _LARGEST)
    if GROUP:
        sums = tl.sum(tl.reshape(rounded - _MAGIC, (BLOCK // GROUP, GROUP)), 1)
        groups = tl.arange(0, BLOCK // GROUP)
        tl.store(sums_ptr + groups * num_rows + row, sums, mask=groups < tl.cdiv(K, GROUP))


def quantize_int16_triton(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: Activation | None = None,
    gated: bool = True,
    group: int = 0,
) -> Int16Activations:
    """`quantize_int16_torch` as one kernel; x's rows may be strided."""
    num_rows, size = x.shape[0], x.shape[1] // (2 if activation is not None and gated else 1)
    digits = torch.empty((2 * num_rows, size), dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    sums = torch.empty((-(-size // group), num_rows), dtype=torch.float32, device=x.device) if group else None
    if num_rows:
        block, pdl = max(next_power_of_2(size), group), use_pdl(x)
        _quantize_int16_kernel[(num_rows,)](
            x, x if norm_weight is None else norm_weight, digits, scales, scales if sums is None else sums, num_rows,
            x.stride(0), size, eps, NORM=norm_weight is not None, ACTIVATION=activation, GATED=gated, GROUP=group,
            BLOCK=block, PDL=pdl, num_warps=min(max(block // 512, 1), 16), launch_pdl=pdl,
        )  # fmt: skip
    return Int16Activations(digits, scales, sums)
