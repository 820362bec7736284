"""Products with quantized weights: the encodings that a backend takes, and how it lays out a weight."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from runtime.kernels.experts.moe_torch import ExpertLayer, Experts
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.numerics import Numerics
from runtime.kernels.quantized import wna16_cpu
from runtime.kernels.quantized.fp8_w8a8_gemm import fits_fp8_gemm
from runtime.kernels.quantized.quantized_weight import (
    MAX_GROUP,
    QuantizedWeight,
    pack_planes,
    plane_of,
    quantized_weight,
)
from runtime.kernels.quantized.upcast import E2M1
from runtime.kernels.table import Kernels
from runtime.kernels.triton_language import INTERPRETED
from runtime.quant.encodings import Encoding, Float8, Integer4, Integer8, Table
from runtime.quant.weight_format import Shape, Weight
from runtime.spec.decoder_spec import ExpertsSpec


class QuantizedProducts(Protocol):
    """The products of one backend on one type of device."""

    def takes(self, encoding: Encoding) -> bool:
        """True if weights in this encoding can stay quantized, where their shape fits (`Encoding.fits`)."""

    def fits(self, encoding: Encoding, shape: Shape) -> bool:
        """True if a weight of this shape can stay quantized, in an encoding that the backend takes."""

    def packed(self, encoding: Encoding, weight: Weight) -> Weight:
        """A weight in the layout of the device.

        Its tensors keep their rows for each block of rows, so that the parts of a fused layer can be joined
        (`WeightFormat.join`)."""

    def device_bytes(self, encoding: Encoding, shape: Shape) -> int:
        """The bytes of a weight on the device."""

    def dequantizes(self, encoding: Encoding, shape: Shape) -> bool:
        """True if a product of many rows dequantizes a weight of this shape to a dense copy on a GPU."""
        return False

    def linear(self, encoding: Encoding, weight: Weight, bias: torch.Tensor | None, kernels: Kernels) -> Linear:
        """The linear layer with a packed weight."""

    def experts(
        self,
        encoding: Encoding,
        spec: ExpertsSpec,
        router: Linear,
        weights: Iterable[tuple[Weight, Weight]],
        kernels: Kernels,
    ) -> ExpertLayer:
        """A mixture from the packed gate_up and down of each expert; here, one expert runs after another."""
        return Experts(
            spec, router, weights, lambda weight: self.linear(encoding, weight, None, kernels).product, kernels.activate
        )


class CpuProducts(QuantizedProducts):
    """bfloat16 products on a CPU with AVX2 or AVX-512, for int4 weights, and for int8 weights with a scale a row."""

    def __init__(self, deterministic: bool) -> None:
        self._deterministic = deterministic

    def takes(self, encoding: Encoding) -> bool:
        if encoding.scale_rows > 1 or not isinstance(encoding, Integer8):
            return False
        return isinstance(encoding, Integer4) or not (encoding.group_size or encoding.has_zero_points)

    def fits(self, encoding: Encoding, shape: Shape) -> bool:
        if encoding.bits == 8:
            return shape[1] % wna16_cpu.INT8_COLUMNS == 0
        return shape[0] % wna16_cpu.int4_rows() == 0 and _group(encoding, shape) > 0

    def packed(self, encoding: Encoding, weight: Weight) -> Weight:
        quantized, scale, *zero_points = weight
        if encoding.bits == 8:
            return quantized.contiguous(), scale.to(torch.bfloat16)
        quantized = quantized if zero_points else (quantized + 8).view(torch.uint8)
        zero = 8 * scale - zero_points[0] if zero_points else torch.zeros_like(scale)
        repeats = quantized.shape[1] // _group(encoding, tuple(quantized.shape)) // scale.shape[1]
        both = torch.stack((scale, zero), -1).to(torch.bfloat16).repeat_interleave(repeats, 1)
        return quantized[:, ::2] | quantized[:, 1::2] << 4, both

    def device_bytes(self, encoding: Encoding, shape: Shape) -> int:
        if encoding.bits == 8:
            return shape[0] * (shape[1] + 2)
        return shape[0] * (shape[1] // 2 + 4 * (shape[1] // _group(encoding, shape)))

    def linear(self, encoding: Encoding, weight: Weight, bias: torch.Tensor | None, kernels: Kernels) -> Linear:
        quantized, scale = weight
        if encoding.bits == 8:
            product = wna16_cpu.int8_product(quantized, scale.view(-1), bias, self._deterministic)
        else:
            by_group = scale.transpose(0, 1).contiguous()
            product = wna16_cpu.int4_product(wna16_cpu.pack_int4(quantized), by_group, bias, self._deterministic)
        return Linear(product, kernels.norm, kernels.activate)


def _group(encoding: Encoding, shape: Shape) -> int:
    """The group size on a CPU: the largest supported one that divides the encoding's; 0 if there is none."""
    columns = encoding.group_size or shape[1]
    if shape[1] % columns:
        return 0
    return next((group for group in wna16_cpu.INT4_GROUPS if columns % group == 0), 0)


class TritonProducts(QuantizedProducts):
    """The kernels of runtime/kernels/quantized and runtime/kernels/experts."""

    def __init__(self, numerics: Numerics) -> None:
        self._numerics = numerics

    def takes(self, encoding: Encoding) -> bool:
        known = isinstance(encoding, Float8 | Integer8 | Table)
        has_groups = encoding.group_size in (32, 64) or (
            encoding.group_size > 0 and encoding.group_size % MAX_GROUP == 0
        )
        has_groups = has_groups or (encoding.group_size == 16 and encoding.bits == 4)
        return known and (has_groups or (encoding.group_size == 0 and encoding.scale_rows == 1))

    def fits(self, encoding: Encoding, shape: Shape) -> bool:
        return shape[1] % (2 * plane_of(encoding.group_size) if encoding.bits == 4 else 16) == 0

    def packed(self, encoding: Encoding, weight: Weight) -> Weight:
        quantized, *more = weight
        if isinstance(encoding, Integer4 | Table):
            quantized = quantized if quantized.dtype == torch.uint8 else (quantized + 8).view(torch.uint8)
            return pack_planes(quantized, plane_of(encoding.group_size)), *more
        return ((quantized ^ 128).view(torch.int8) if quantized.dtype == torch.uint8 else quantized), *more

    def device_bytes(self, encoding: Encoding, shape: Shape) -> int:
        return encoding.device_bytes(shape)

    def dequantizes(self, encoding: Encoding, shape: Shape) -> bool:
        name = "fp8" if isinstance(encoding, Float8) else ""
        has_fp8 = fits_fp8_gemm(name, shape, encoding.group_size, encoding.scale_rows, self._numerics.device)
        return not self._numerics.deterministic and not has_fp8

    def linear(self, encoding: Encoding, weight: Weight, bias: torch.Tensor | None, kernels: Kernels) -> Linear:
        assert kernels.quantized_linear is not None
        return kernels.quantized_linear(_quantized(encoding, weight), bias)

    def experts(
        self,
        encoding: Encoding,
        spec: ExpertsSpec,
        router: Linear,
        weights: Iterable[tuple[Weight, Weight]],
        kernels: Kernels,
    ) -> ExpertLayer:
        assert kernels.quantized_experts is not None
        pairs = ((_quantized(encoding, gate_up), _quantized(encoding, down)) for gate_up, down in weights)
        return kernels.quantized_experts(spec, router, pairs)


def _quantized(encoding: Encoding, weight: Weight) -> QuantizedWeight:
    """A packed weight in the layout that kernels read."""
    quantized, scales, *more = weight
    zero_points = more[0] if more else None
    table: tuple[float, ...] = ()
    name = "fp8"
    if isinstance(encoding, Table):
        name, table = "e2m1" if encoding.table == E2M1 else "table", encoding.table
    elif isinstance(encoding, Integer8):
        name = "int8" if encoding.bits == 8 else "int4" if zero_points is None else "uint4"
        if zero_points is not None and encoding.bits == 8:
            zero_points = zero_points - 128 * scales  # values were made signed
    return quantized_weight(
        name,
        quantized,
        scales,
        zero_points,
        group_size=encoding.group_size,
        scale_rows=encoding.scale_rows,
        table=table,
    )


def lacks_vector_code(numerics: Numerics) -> bool:
    """True for a CPU on which torch lacks fast products with quantized weights."""
    return numerics.device.type == "cpu" and not wna16_cpu.has_vector_code()


def products_of(numerics: Numerics) -> QuantizedProducts | None:
    """The products of a backend; None if it has none and dequantizes all weights."""
    on_cpu = numerics.backend == "torch" and numerics.device.type == "cpu"
    if on_cpu and numerics.dtype == torch.bfloat16 and not lacks_vector_code(numerics):
        return CpuProducts(numerics.deterministic)
    if numerics.backend == "triton" and (numerics.dtype == torch.bfloat16 or INTERPRETED):
        return TritonProducts(numerics)
    return None
