"""Products with weights that stay codes: which forms they take, and how a weight lies on their device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from runtime.kernels.experts.moe_w16a16 import ExpertLayer, Experts
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
    """The products of one backend, on one kind of device."""

    def takes(self, form: Encoding) -> bool:
        """True if weights of the form can stay codes; of those that the form itself says fit (`Encoding.fits`)."""

    def fits(self, form: Encoding, shape: Shape) -> bool:
        """True if a weight of this shape, in a form that is taken, can stay codes."""

    def packed(self, form: Encoding, weight: Weight) -> Weight:
        """A form's weight as it stays on the device: tensors with as many rows for a block of the weight's as the
        form's have, so that those of the parts of a fused map can be joined (`WeightFormat.join`)."""

    def device_bytes(self, form: Encoding, shape: Shape) -> int:
        """The bytes of a weight on the device."""

    def dequantizes(self, form: Encoding, shape: Shape) -> bool:
        """True if the product of many rows with a weight of this shape makes a dense copy of it on a GPU."""
        return False

    def linear(self, form: Encoding, weight: Weight, bias: torch.Tensor | None, kernels: Kernels) -> Linear:
        """The product with a packed weight, and what surrounds it in a decoder."""

    def experts(
        self,
        form: Encoding,
        spec: ExpertsSpec,
        router: Linear,
        weights: Iterable[tuple[Weight, Weight]],
        kernels: Kernels,
    ) -> ExpertLayer:
        """A mixture from each expert's packed gate_up and down; here one expert's products after another's."""
        return Experts(
            spec, router, weights, lambda weight: self.linear(form, weight, None, kernels).product, kernels.activate
        )


class CpuProducts(QuantizedProducts):
    """Products of bfloat16 inputs on a CPU with AVX2 or AVX-512: with int8 weights that have a scale a row, and with
    int4."""

    def __init__(self, deterministic: bool) -> None:
        self._deterministic = deterministic

    def takes(self, form: Encoding) -> bool:
        if form.scale_rows > 1 or not isinstance(form, Integer8):
            return False
        return isinstance(form, Integer4) or not (form.group_size or form.has_zero_points)

    def fits(self, form: Encoding, shape: Shape) -> bool:
        if form.bits == 8:
            return shape[1] % wna16_cpu.INT8_COLUMNS == 0
        return shape[0] % wna16_cpu.int4_rows() == 0 and _group(form, shape) > 0

    def packed(self, form: Encoding, weight: Weight) -> Weight:
        codes, scale, *minimum = weight
        if form.bits == 8:
            return codes.contiguous(), scale.to(torch.bfloat16)
        codes = codes if minimum else (codes + 8).view(torch.uint8)
        zero = 8 * scale - minimum[0] if minimum else torch.zeros_like(scale)
        repeats = codes.shape[1] // _group(form, tuple(codes.shape)) // scale.shape[1]
        both = torch.stack((scale, zero), -1).to(torch.bfloat16).repeat_interleave(repeats, 1)
        return codes[:, ::2] | codes[:, 1::2] << 4, both

    def device_bytes(self, form: Encoding, shape: Shape) -> int:
        if form.bits == 8:
            return shape[0] * (shape[1] + 2)
        return shape[0] * (shape[1] // 2 + 4 * (shape[1] // _group(form, shape)))

    def linear(self, form: Encoding, weight: Weight, bias: torch.Tensor | None, kernels: Kernels) -> Linear:
        codes, scale = weight
        if form.bits == 8:
            product = wna16_cpu.int8_product(codes, scale.view(-1), bias, self._deterministic)
        else:
            by_group = scale.transpose(0, 1).contiguous()
            product = wna16_cpu.int4_product(wna16_cpu.pack_int4(codes), by_group, bias, self._deterministic)
        return Linear(product, kernels.norm, kernels.activate)


def _group(form: Encoding, shape: Shape) -> int:
    """The columns that share a scale on a CPU: as many of the form's as there are operations for; 0: none."""
    columns = form.group_size or shape[1]
    if shape[1] % columns:
        return 0
    return next((group for group in wna16_cpu.INT4_GROUPS if columns % group == 0), 0)


class TritonProducts(QuantizedProducts):
    """The products of quantized_linear.py and quantized_experts.py in bfloat16, and with fp8 codes those of
    fp8_linear.py and fp8_experts.py."""

    def __init__(self, numerics: Numerics) -> None:
        self._numerics = numerics

    def takes(self, form: Encoding) -> bool:
        known = isinstance(form, Float8 | Integer8 | Table)
        has_groups = form.group_size in (32, 64) or (form.group_size > 0 and form.group_size % MAX_GROUP == 0)
        has_groups = has_groups or (form.group_size == 16 and form.bits == 4)
        return known and (has_groups or (form.group_size == 0 and form.scale_rows == 1))

    def fits(self, form: Encoding, shape: Shape) -> bool:
        return shape[1] % (2 * plane_of(form.group_size) if form.bits == 4 else 16) == 0

    def packed(self, form: Encoding, weight: Weight) -> Weight:
        codes, *more = weight
        if isinstance(form, Integer4 | Table):
            codes = codes if codes.dtype == torch.uint8 else (codes + 8).view(torch.uint8)
            return pack_planes(codes, plane_of(form.group_size)), *more
        return ((codes ^ 128).view(torch.int8) if codes.dtype == torch.uint8 else codes), *more

    def device_bytes(self, form: Encoding, shape: Shape) -> int:
        return form.device_bytes(shape)

    def dequantizes(self, form: Encoding, shape: Shape) -> bool:
        name = "fp8" if isinstance(form, Float8) else ""
        has_fp8 = fits_fp8_gemm(name, shape, form.group_size, form.scale_rows, self._numerics.device)
        return not self._numerics.deterministic and not has_fp8

    def linear(self, form: Encoding, weight: Weight, bias: torch.Tensor | None, kernels: Kernels) -> Linear:
        assert kernels.quantized_linear is not None
        return kernels.quantized_linear(_quantized(form, weight), bias)

    def experts(
        self,
        form: Encoding,
        spec: ExpertsSpec,
        router: Linear,
        weights: Iterable[tuple[Weight, Weight]],
        kernels: Kernels,
    ) -> ExpertLayer:
        assert kernels.quantized_experts is not None
        pairs = ((_quantized(form, gate_up), _quantized(form, down)) for gate_up, down in weights)
        return kernels.quantized_experts(spec, router, pairs)


def _quantized(form: Encoding, weight: Weight) -> QuantizedWeight:
    """A packed weight as kernels read it."""
    codes, scales, *more = weight
    minimums = more[0] if more else None
    table: tuple[float, ...] = ()
    name = "fp8"
    if isinstance(form, Table):
        name, table = "e2m1" if form.table == E2M1 else "table", form.table
    elif isinstance(form, Integer8):
        name = "int8" if form.bits == 8 else "int4" if minimums is None else "uint4"
        if minimums is not None and form.bits == 8:
            minimums = minimums - 128 * scales  # of codes that were made signed
    return quantized_weight(
        name, codes, scales, minimums, group_size=form.group_size, scale_rows=form.scale_rows, table=table
    )


def lacks_vector_code(numerics: Numerics) -> bool:
    """True for a CPU whose instructions torch has no products with quantized weights for."""
    return numerics.device.type == "cpu" and not wna16_cpu.has_vector_code()


def products_of(numerics: Numerics) -> QuantizedProducts | None:
    """The products of a backend; None: it has none, so that all weights are widened."""
    on_cpu = numerics.backend == "torch" and numerics.device.type == "cpu"
    if on_cpu and numerics.dtype == torch.bfloat16 and not lacks_vector_code(numerics):
        return CpuProducts(numerics.deterministic)
    if numerics.backend == "triton" and (numerics.dtype == torch.bfloat16 or INTERPRETED):
        return TritonProducts(numerics)
    return None
