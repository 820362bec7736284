"""Rows of activations as e4m3 codes with a scale each, made together with the operation before a linear layer.

A row's scale is its largest magnitude over the largest code: it depends on no other row. A row that is not finite stays
so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.linear.linear_torch import Norm
from runtime.kernels.magnitudes import larger, largest_magnitude, to_e4m3, within
from runtime.kernels.norm.gated_activation import Activation, activated, gated_activation_torch
from runtime.kernels.norm.rms_norm import rms_norm_torch, rms_norm_triton
from runtime.kernels.triton_language import constexpr, jit, next_power_of_2, tl, use_pdl

_LARGEST = constexpr(448.0)  # code of e4m3
_SMALLEST = constexpr(2.0**-100)  # magnitude that a row is taken to have, so that zeros have a scale


class Fp8Activations(NamedTuple):
    """Numbers [num_rows, K] as code * scale of the row."""

    codes: torch.Tensor  # [num_rows, K] float8_e4m3fn, contiguous
    scales: torch.Tensor  # [num_rows] float32

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return (self.codes.float() * self.scales[:, None]).to(dtype)


def quantize_fp8_torch(
    x: torch.Tensor,  # [num_rows, K]; with a gated activation [num_rows, 2 * K]
    norm_weight: torch.Tensor | None = None,  # of an RMS norm, which comes first
    eps: float = 0.0,
    activation: Activation | None = None,
    gated: bool = True,
) -> Fp8Activations:
    """x, its norm or its gated activation, rounded from float32 to codes."""
    wide = wide_rows(x, norm_weight, eps, activation, gated)
    largest = wide.abs().amax(1, keepdim=True).clamp_min(2.0**-100)
    return Fp8Activations(
        (wide * (448.0 / largest)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), largest[:, 0] / 448.0
    )


def wide_rows(
    x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, activation: Activation | None, gated: bool
) -> torch.Tensor:
    """x, its norm or its gated activation in float32."""
    wide = x.float()
    if norm_weight is not None:
        wide = rms_norm_torch(wide, norm_weight.float(), eps)
    return wide if activation is None else gated_activation_torch(wide, activation, gated)


@jit
def load_row(
    at, norm_ptr, cols, K, eps,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The row at a pointer, its norm or its gated activation, in float32; zeros behind column K."""
    inside = cols < K
    if NORM:
        weight = tl.load(norm_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.load(at + cols, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        x = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / K + eps)) * weight
    if ACTIVATION is not None:
        if GATED:
            up = tl.load(at + cols + K, mask=inside, other=0.0).to(tl.float32)
            x = activated(x, ACTIVATION) * up
        else:
            x = activated(x, ACTIVATION)
    return x


@jit
def _quantize_fp8_kernel(
    x_ptr,  # [num_rows, K], or [num_rows, 2 * K] if GATED; rows x_stride apart
    norm_ptr,  # [K], read if NORM
    codes_ptr,  # [num_rows, K] contiguous
    scales_ptr,  # [num_rows]
    x_stride,
    K,
    eps,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least K
    PDL: tl.constexpr,
):
    """Program i: row i."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < K
    x = load_row(x_ptr + row * x_stride, norm_ptr, cols, K, eps, NORM, ACTIVATION, GATED, PDL)
    largest = larger(largest_magnitude(x, 0), _SMALLEST)
    codes = within(x * (_LARGEST / largest), _LARGEST)
    tl.store(codes_ptr + row * K + cols, to_e4m3(codes), mask=inside)
    tl.store(scales_ptr + row, largest / _LARGEST)


def quantize_fp8_triton(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: Activation | None = None,
    gated: bool = True,
) -> Fp8Activations:
    """`quantize_fp8_torch` as one kernel; x's rows may be strided."""
    num_rows, size = x.shape[0], x.shape[1] // (2 if activation is not None and gated else 1)
    codes = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        block, pdl = next_power_of_2(size), use_pdl(x)
        _quantize_fp8_kernel[(num_rows,)](
            x, x if norm_weight is None else norm_weight, codes, scales, x.stride(0), size, eps,
            NORM=norm_weight is not None, ACTIVATION=activation, GATED=gated, BLOCK=block, PDL=pdl,
            num_warps=min(max(block // 512, 1), 16), launch_pdl=pdl,
        )  # fmt: skip
    return Fp8Activations(codes, scales)


def quantize_normed_fp8(x: torch.Tensor, norm_weight: torch.Tensor, eps: float, norm: Norm) -> Fp8Activations:
    """norm(x) as codes; an RMS norm's in the same kernel."""
    if norm is rms_norm_triton:
        return quantize_fp8_triton(x, norm_weight, eps)
    return quantize_fp8_triton(norm(x, norm_weight, eps))
