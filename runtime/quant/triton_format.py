"""The format of quantized weights on a GPU, for runtime/kernels/quantized and runtime/kernels/experts."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from runtime.kernels.experts.moe_wna16_words import scale_bytes, value_bytes
from runtime.kernels.numerics import Numerics
from runtime.kernels.quantized.fp8_w8a8_gemm import fits_fp8_gemm
from runtime.kernels.quantized.quantized_weight import (
    MAX_GROUP,
    QuantizedWeight,
    pack_planes,
    plane_of,
    quantized_weight,
)
from runtime.kernels.quantized.upcast import E2M1
from runtime.quant.encodings import Encoding, Float8, Integer4, Integer8, Table
from runtime.quant.quantized_formats import QuantizedFormat
from runtime.quant.weight_format import Shape, Tensors


class TritonFormat(QuantizedFormat):
    """Values with 8 bits, or with 4 bits in planes, and float32 scales. The operand is a `QuantizedWeight`."""

    @staticmethod
    def takes(encoding: Encoding) -> bool:
        known = isinstance(encoding, Float8 | Integer8 | Table)
        has_groups = encoding.group_size in (32, 64) or (
            encoding.group_size > 0 and encoding.group_size % MAX_GROUP == 0
        )
        has_groups = has_groups or (encoding.group_size == 16 and encoding.bits == 4)
        return known and (has_groups or (encoding.group_size == 0 and encoding.scale_rows == 1))

    @staticmethod
    def fits(encoding: Encoding, shape: Shape) -> bool:
        return shape[1] % (2 * plane_of(encoding.group_size) if encoding.bits == 4 else 16) == 0

    def packed(self, weight: Tensors) -> Tensors:
        quantized, more = weight[0], self.encoding.scales_of(weight)
        if isinstance(self.encoding, Integer4 | Table):
            quantized = quantized if quantized.dtype == torch.uint8 else (quantized + 8).view(torch.uint8)
            return pack_planes(quantized, plane_of(self.encoding.group_size)), *more
        return ((quantized ^ 128).view(torch.int8) if quantized.dtype == torch.uint8 else quantized), *more

    def device_bytes(self, shape: Shape, numerics: Numerics) -> int:
        encoding = self.encoding
        size = encoding.flat.device_bytes(shape)
        if not self._is_expert:
            return size
        values = value_bytes(encoding.bits, shape)
        if encoding.bits != 4 or not encoding.group_size:
            return size - math.prod(shape) * encoding.bits // 8 + values
        return values + scale_bytes(encoding.group_size, shape) * (1 + encoding.has_zero_points)

    def dequantizes(self, shape: Shape) -> bool:
        encoding, numerics = self.encoding, self.numerics
        name = "fp8" if isinstance(encoding, Float8) else ""
        has_fp8 = fits_fp8_gemm(name, shape, encoding.group_size, encoding.scale_rows, numerics.device)
        return not numerics.deterministic and not has_fp8

    def operand(self, pieces: Iterable[Tensors], num_rows: int) -> QuantizedWeight:
        ((quantized, scales, *more),) = pieces
        encoding, zero_points = self.encoding, more[0] if more else None
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
