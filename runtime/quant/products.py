"""Products with quantized weights: the encodings that a backend takes, and how it lays out a weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.kernels.cpu.linear.interleaved_weight import (
    InterleavedWeight,
    RowMajorWeight,
    interleave_pieces,
    interleaved_bytes,
)
from runtime.kernels.cpu.linear.weight_form import COLUMNS, E2M1_OFFSET, WeightForm
from runtime.kernels.experts.moe_torch import Experts, Mixture, Router
from runtime.kernels.experts.moe_wna16_words import scale_bytes, value_bytes
from runtime.kernels.linear.linear_torch import Linear
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
from runtime.kernels.table import Kernels
from runtime.kernels.triton_language import INTERPRETED
from runtime.quant.encodings import Encoding, Float8, Integer4, Integer8, Table
from runtime.quant.weight_format import Shape, Weight


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

    def expert_bytes(self, encoding: Encoding, shape: Shape) -> int:
        """The bytes of a weight of one expert on the device."""
        return self.device_bytes(encoding, shape)

    def dequantizes(self, encoding: Encoding, shape: Shape) -> bool:
        """True if a product of many rows dequantizes a weight of this shape to a dense copy on a GPU."""
        return False

    def linear(self, encoding: Encoding, weight: Weight, bias: torch.Tensor | None, kernels: Kernels) -> Linear:
        """The linear layer with a packed weight."""

    def experts(
        self,
        encoding: Encoding,
        spec: ExpertsSpec,
        router: Router,
        weights: Iterable[tuple[Weight, Weight]],
        kernels: Kernels,
    ) -> Mixture:
        """A mixture from the packed gate_up and down of each expert; here, one expert runs after another."""
        return Experts(
            spec, router, weights, lambda weight: self.linear(encoding, weight, None, kernels).product, kernels.activate
        )


class LlvmProducts(QuantizedProducts):
    """Integer products on a CPU, of weights with 4 to 8 bits and a scale for each group of columns, or for each row.

    The numbers of e2m1 are integers, times a half.
    A packed weight has the tensors of a `RowMajorWeight`."""

    def takes(self, encoding: Encoding) -> bool:
        has_groups = encoding.group_size in (0, 16) or encoding.group_size % COLUMNS == 0
        is_known = isinstance(encoding, Integer8) or _is_e2m1(encoding)
        return is_known and encoding.scale_rows == 1 and has_groups

    def fits(self, encoding: Encoding, shape: Shape) -> bool:
        return all(shape[1] % (size or 1) == 0 for size in (COLUMNS, encoding.group_size, encoding.super_size))

    def packed(self, encoding: Encoding, weight: Weight) -> Weight:
        values, *shared = weight
        if _is_e2m1(encoding):
            shared = [shared[0] * 0.5]
        elif not encoding.has_zero_points:
            values = values.view(torch.uint8) + _form(encoding).offset
        if shared[0].dtype == torch.float32:
            known = _form(encoding).scale_dtype
            narrow = known if known != torch.float32 else _narrowest(shared)
            shared = [tensor.to(narrow) for tensor in shared]
        return values, *shared

    def device_bytes(self, encoding: Encoding, shape: Shape) -> int:
        """An upper bound: the scales of a checkpoint may have a narrower dtype than its config promises."""
        return interleaved_bytes(_form(encoding), (shape[0], shape[1]))

    def interleaved(self, encoding: Encoding, pieces: Iterable[Weight], num_rows: int) -> InterleavedWeight:
        """The weight of `num_rows` from packed pieces of its rows (`interleave_pieces`)."""
        return interleave_pieces((_row_major(encoding, piece) for piece in pieces), num_rows)

    def linear(self, encoding: Encoding, weight: Weight, bias: torch.Tensor | None, kernels: Kernels) -> Linear:
        assert kernels.interleaved_linear is not None
        return kernels.interleaved_linear([self.interleaved(encoding, [weight], len(weight[0]))], bias)


def _form(encoding: Encoding) -> WeightForm:
    """The form of weights, with the widest scales that they may have. Symmetric values are stored unsigned."""
    bits = encoding.value_bits or encoding.bits
    if _is_e2m1(encoding):  # half a power of two is exact in bfloat16
        dtype = torch.bfloat16 if encoding.scale_dtype == torch.float8_e8m0fnu else encoding.scale_dtype
        return WeightForm(bits, encoding.group_size, dtype, E2M1_OFFSET, is_e2m1=True)
    of_factors = torch.uint8 if encoding.has_zero_points else torch.int8
    return WeightForm(
        bits,
        encoding.group_size,
        of_factors if encoding.super_size else encoding.scale_dtype,
        0 if encoding.has_zero_points else 1 << bits - 1,
        encoding.has_zero_points,
        encoding.super_size,
    )


def _is_e2m1(encoding: Encoding) -> bool:
    return isinstance(encoding, Table) and encoding.table == E2M1


def _row_major(encoding: Encoding, weight: Weight) -> RowMajorWeight:
    """A packed weight with its form. Random weights lack factors of scales."""
    values, *shared = weight
    count = 1 + encoding.has_zero_points
    (scales, *minimums), factors = shared[:count], shared[count:]
    form = _form(encoding)._replace(scale_dtype=scales.dtype, super_size=encoding.super_size if factors else 0)
    more = [(*tensors, None)[0] for tensors in (minimums, factors[:1], factors[1:])]
    return RowMajorWeight(form, values, scales, *more)


def _narrowest(numbers: Sequence[torch.Tensor]) -> torch.dtype:
    """The first dtype that holds all numbers without loss."""
    for dtype in (torch.float16, torch.bfloat16):
        if all(torch.equal(tensor.to(dtype).float(), tensor) for tensor in numbers):
            return dtype
    return torch.float32


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
        quantized, more = weight[0], encoding.scales_of(weight)
        if isinstance(encoding, Integer4 | Table):
            quantized = quantized if quantized.dtype == torch.uint8 else (quantized + 8).view(torch.uint8)
            return pack_planes(quantized, plane_of(encoding.group_size)), *more
        return ((quantized ^ 128).view(torch.int8) if quantized.dtype == torch.uint8 else quantized), *more

    def device_bytes(self, encoding: Encoding, shape: Shape) -> int:
        return encoding.flat.device_bytes(shape)

    def expert_bytes(self, encoding: Encoding, shape: Shape) -> int:
        values = value_bytes(encoding.bits, shape)
        if encoding.bits != 4 or not encoding.group_size:
            return self.device_bytes(encoding, shape) - math.prod(shape) * encoding.bits // 8 + values
        return values + scale_bytes(encoding.group_size, shape) * (1 + encoding.has_zero_points)

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
        router: Router,
        weights: Iterable[tuple[Weight, Weight]],
        kernels: Kernels,
    ) -> Mixture:
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


def products_of(numerics: Numerics) -> QuantizedProducts | None:
    """The products of a backend; None if it has none and dequantizes all weights."""
    if numerics.backend == "llvm":
        return LlvmProducts()
    if numerics.backend == "triton" and (numerics.dtype == torch.bfloat16 or INTERPRETED):
        return TritonProducts(numerics)
    return None
