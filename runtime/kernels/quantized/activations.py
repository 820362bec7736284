"""Activations quantized for a linear layer, in the kernel of the norm or the activation before it.

A row's scale is its largest magnitude over the largest value, so it depends on no other row. A row with a number that
is not finite stays not finite. fp8 is e4m3. int16 is split into two int8 limbs for the int8 matrix units; rounding errs
by at most 1/65,024 of the row's largest magnitude.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.kernels.linear.linear_torch import Norm
from runtime.kernels.magnitudes import larger, largest_magnitude, to_e4m3, within
from runtime.kernels.norm.gated_activation import Activation, activated, gated_activation_torch, gated_by
from runtime.kernels.norm.rms_norm import rms_norm_torch, rms_norm_triton
from runtime.kernels.triton_language import constexpr, jit, next_power_of_2, tl, use_pdl

_LARGEST_FP8 = constexpr(448.0)
_LARGEST_INT16 = constexpr(32512.0)  # 127 * 256
_SMALLEST = constexpr(2.0**-100)  # lower bound for a row's largest magnitude, so that a zero row has a scale
_LEAST_CUT = 1024  # smaller rows take one block
_MANY_ROWS = 1024  # programs that hide each other's latency; their warps were measured on an H200
_MAGIC = constexpr(12582912.0)  # 1.5 * 2 ** 23: adding it rounds a number to the sum's low bits
_MAGIC_BITS = constexpr(0x4B400000)


class Fp8Activations(NamedTuple):
    """Numbers [num_rows, K]: value * scale of the row."""

    values: torch.Tensor  # [num_rows, K] float8_e4m3fn, contiguous
    scales: torch.Tensor  # [num_rows] float32

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.values.float() * self.scales[:, None]).to(dtype)


def quantize_fp8_torch(
    x: torch.Tensor,  # [num_rows, K]; with a gated activation [num_rows, 2 * K]
    norm_weight: torch.Tensor | None = None,  # an RMS norm's, which comes first
    eps: float = 0.0,
    activation: Activation | None = None,
    gated: bool = True,
) -> Fp8Activations:
    """x, its norm or its gated activation, rounded from float32 to fp8."""
    wide = rows_in_float32(x, norm_weight, eps, activation, gated)
    largest = wide.abs().amax(1, keepdim=True).clamp_min(2.0**-100)
    return Fp8Activations(
        (wide * (448.0 / largest)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), largest[:, 0] / 448.0
    )


class Int16Activations(NamedTuple):
    """Numbers [num_rows, K]: (256 * high limb + low limb) * scale of the row."""

    limbs: torch.Tensor  # [2 * num_rows, K] int8: a row's high limbs, then its low ones
    scales: torch.Tensor  # [num_rows] float32
    sums: torch.Tensor | None = None  # float32 [ceil(K / group_size), num_rows]: each group's sum

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        high, low = self.limbs.double().view(len(self.scales), 2, -1).unbind(1)
        return ((256 * high + low) * self.scales[:, None]).to(dtype)


def quantize_int16_torch(
    x: torch.Tensor,  # [num_rows, K]; with a gated activation [num_rows, 2 * K]
    norm_weight: torch.Tensor | None = None,  # an RMS norm's, which comes first
    eps: float = 0.0,
    activation: Activation | None = None,
    gated: bool = True,
    group_size: int = 0,  # columns per sum; 0 for no sums
) -> Int16Activations:
    """x, its norm or its gated activation, rounded from float32 to int16."""
    wide = rows_in_float32(x, norm_weight, eps, activation, gated)
    largest = wide.abs().amax(1, keepdim=True).clamp_min(2.0**-100)
    numbers = (wide * (32512.0 / largest)).round()
    high = torch.floor((numbers + 128) / 256)
    limbs = torch.stack((high, numbers - 256 * high), 1).to(torch.int8).flatten(0, 1)
    sums = None
    if group_size:
        groups = F.pad(numbers, (0, -numbers.shape[1] % group_size)).unflatten(1, (-1, group_size))
        sums = groups.sum(2).t().contiguous()
    return Int16Activations(limbs, largest[:, 0] / 32512.0, sums)


def rows_in_float32(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, activation: Activation | None, gated: bool
) -> torch.Tensor:
    """x, its norm or its gated activation in float32."""
    wide = x.float()
    if norm_weight is not None:
        wide = rms_norm_torch(wide, norm_weight.float(), eps)
    return wide if activation is None else gated_activation_torch(wide, activation, gated)


class QuantizeForm(NamedTuple):
    """Constants of both kernels."""

    norm: bool
    gated: bool
    pdl: bool
    block: int  # power of two, at least K less the tail
    group_size: int = 0
    tail: int = 0  # power of two, or 0: columns after the block, without a norm


@jit
def _load_row(at, norm_ptr, cols, K, eps, FORM: tl.constexpr, ACTIVATION: tl.constexpr):
    """The row at a pointer, its norm or its gated activation, in float32; zeros behind column K."""
    inside = cols < K
    if FORM.norm:
        weight = tl.load(norm_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(at + cols, mask=inside, other=0.0).to(tl.float32)
    if FORM.norm:
        x = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / K + eps)) * weight
    if ACTIVATION is not None:
        if FORM.gated:
            up = tl.load(at + cols + K, mask=inside, other=0.0).to(tl.float32)
            x = gated_by(x, up, ACTIVATION)
        else:
            x = activated(x, ACTIVATION)
    return x


@jit
def _quantize_fp8_kernel(
    x_ptr,  # [num_rows, K], or [num_rows, 2 * K] if GATED; rows x_stride apart
    norm_ptr,  # [K], read if NORM
    values_ptr,  # [num_rows, K] contiguous
    scales_ptr,  # [num_rows]
    x_stride,
    K,
    eps,
    FORM: tl.constexpr,  # `QuantizeForm`
    ACTIVATION: tl.constexpr,
):
    """Program i: row i."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, FORM.block)
    inside = cols < K
    x = _load_row(x_ptr + row * x_stride, norm_ptr, cols, K, eps, FORM, ACTIVATION)
    largest = larger(largest_magnitude(x, 0), _SMALLEST)
    if FORM.tail:
        tail_cols = FORM.block + tl.arange(0, FORM.tail)
        tail = _load_row(x_ptr + row * x_stride, norm_ptr, tail_cols, K, eps, FORM, ACTIVATION)
        largest = larger(largest, largest_magnitude(tail, 0))
        values = within(tail * (_LARGEST_FP8 / largest), _LARGEST_FP8)
        tl.store(values_ptr + row * K + tail_cols, to_e4m3(values), mask=tail_cols < K)
    values = within(x * (_LARGEST_FP8 / largest), _LARGEST_FP8)
    tl.store(values_ptr + row * K + cols, to_e4m3(values), mask=inside)
    tl.store(scales_ptr + row, largest / _LARGEST_FP8)


def quantize_fp8_triton(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: Activation | None = None,
    gated: bool = True,
) -> Fp8Activations:
    """`quantize_fp8_torch` as one kernel; x's rows may be strided."""
    num_rows, size = x.shape[0], x.shape[1] // (2 if activation is not None and gated else 1)
    values = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        block, tail, pdl = next_power_of_2(size), 0, use_pdl(x)
        if norm_weight is None and 4 * size <= 3 * block and size > _LEAST_CUT:  # much of a block would be idle
            block, tail = block // 2, max(64, next_power_of_2(size - block // 2))
        num_warps = min(max(block // 512, 1), 16)
        if num_rows >= _MANY_ROWS:
            num_warps = 32 if activation is not None and block + tail >= 16384 else min(max(block // 1024, 1), 8)
        _quantize_fp8_kernel[(num_rows,)](
            x, x if norm_weight is None else norm_weight, values, scales, x.stride(0), size, eps,
            FORM=QuantizeForm(norm_weight is not None, gated, pdl, block, tail=tail), ACTIVATION=activation,
            num_warps=num_warps, launch_pdl=pdl,
        )  # fmt: skip
    return Fp8Activations(values, scales)


def quantize_normed_fp8(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, norm: Norm) -> Fp8Activations:
    """norm(x) as fp8; an RMS norm runs in the same kernel."""
    if norm is rms_norm_triton:
        return quantize_fp8_triton(x, norm_weight, eps)
    return quantize_fp8_triton(norm(x, norm_weight, eps))


@jit
def _quantize_int16_kernel(
    x_ptr,  # [num_rows, K], or [num_rows, 2 * K] if GATED; rows x_stride apart
    norm_ptr,  # [K], read if NORM
    limbs_ptr,  # [num_rows, 2, K] contiguous
    scales_ptr,  # [num_rows]
    sums_ptr,  # [ceil(K / GROUP_SIZE), num_rows], written if GROUP_SIZE
    num_rows,
    x_stride,
    K,
    eps,
    FORM: tl.constexpr,  # `QuantizeForm`
    ACTIVATION: tl.constexpr,
):
    """Program i: row i."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, FORM.block)
    x = _load_row(x_ptr + row * x_stride, norm_ptr, cols, K, eps, FORM, ACTIVATION)
    largest = larger(largest_magnitude(x, 0), _SMALLEST)
    rounded = x * (_LARGEST_INT16 / largest) + _MAGIC
    numbers = rounded.to(tl.int32, bitcast=True) - _MAGIC_BITS
    high = (numbers + 128) >> 8
    limbs = limbs_ptr + row * (2 * K) + cols
    tl.store(limbs, high.to(tl.int8), mask=cols < K)
    tl.store(limbs + K, (numbers - (high << 8)).to(tl.int8), mask=cols < K)
    tl.store(scales_ptr + row, largest / _LARGEST_INT16)
    if FORM.group_size:
        sums = tl.sum(tl.reshape(rounded - _MAGIC, (FORM.block // FORM.group_size, FORM.group_size)), 1)
        groups = tl.arange(0, FORM.block // FORM.group_size)
        tl.store(sums_ptr + groups * num_rows + row, sums, mask=groups < tl.cdiv(K, FORM.group_size))


def quantize_int16_triton(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: Activation | None = None,
    gated: bool = True,
    group_size: int = 0,
) -> Int16Activations:
    """`quantize_int16_torch` as one kernel; x's rows may be strided."""
    num_rows, size = x.shape[0], x.shape[1] // (2 if activation is not None and gated else 1)
    limbs = torch.empty((2 * num_rows, size), dtype=torch.int8, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    sums = None
    if group_size:
        sums = torch.empty((-(-size // group_size), num_rows), dtype=torch.float32, device=x.device)
    if num_rows:
        block, pdl = max(next_power_of_2(size), group_size), use_pdl(x)
        _quantize_int16_kernel[(num_rows,)](
            x, x if norm_weight is None else norm_weight, limbs, scales, scales if sums is None else sums, num_rows,
            x.stride(0), size, eps, FORM=QuantizeForm(norm_weight is not None, gated, pdl, block, group_size),
            ACTIVATION=activation, num_warps=min(max(block // 512, 1), 16), launch_pdl=pdl,
        )  # fmt: skip
    return Int16Activations(limbs, scales, sums)
