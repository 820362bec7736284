"""Linear layers with quantized weights, which choose a kernel by the number of rows.

| class | few rows | more rows |
| --- | --- | --- |
| `QuantizedLinear` | `wna16_skinny_gemm`, `wna16_gemv` | `w4a16_gemm` or `wna16_gemm`, then a dense copy |
| `Fp8Linear` | one row: as above | `fp8_w8a8_gemm` |
| `Int16Linear` | up to 8: as above | `int_wna16_gemm`, then as above |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F

from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.linear_torch import AdaptedLinear, Linear, Norm
from runtime.kernels.linear.lora import RowAdapters
from runtime.kernels.linear.skinny_gemm import MAX_ROWS
from runtime.kernels.norm.gated_activation import Activation
from runtime.kernels.norm.rms_norm import rms_norm_triton
from runtime.kernels.quantized.activations import (
    Fp8Activations,
    Int16Activations,
    quantize_fp8_triton,
    quantize_int16_triton,
)
from runtime.kernels.quantized.fp8_w8a8_gemm import multiply_fp8
from runtime.kernels.quantized.int_wna16_gemm import FEWEST_INT16_ROWS, int_wna16_gemm_triton, most_int16_rows
from runtime.kernels.quantized.quantized_weight import QuantizedWeight
from runtime.kernels.quantized.w4a16_gemm import (
    FEWEST_W4A16_ROWS,
    MAX_W4A16_ROWS,
    has_w4a16_gemm,
    w4a16_gemm_triton,
)
from runtime.kernels.quantized.weight_conversions import dequantize_triton
from runtime.kernels.quantized.wna16_gemm import MAX_TILE_ROWS, wna16_gemm_triton
from runtime.kernels.quantized.wna16_skinny_gemm import wna16_skinny_gemm_triton

Rows = TypeVar("Rows")


class QuantizedLinear(FusedLinear):
    """`FusedLinear` with a quantized weight and 16-bit activations.

    Up to max_skinny rows, one kernel includes the surrounding operations. Up to max_tiled rows, and in deterministic
    mode always, the product upcasts the weight. Above, cuBLAS multiplies a dense copy."""

    max_skinny = MAX_ROWS
    max_tiled = MAX_TILE_ROWS

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        activation: Activation,
        deterministic: bool,
        gated: bool = True,
        norm: Norm = rms_norm_triton,
    ) -> None:
        super().__init__(weight.values, bias, activation, deterministic, gated, norm)
        self.quantized = weight
        self.skinny_gemm = partial(wna16_skinny_gemm_triton, weight=weight, bias=bias, fixed_order=deterministic)
        self.tiled = partial(wna16_gemm_triton, weight=weight, bias=bias, fixed_order=deterministic)
        if not deterministic and has_w4a16_gemm(weight):
            self.tiled = partial(w4a16_gemm_triton, weight=weight, bias=bias)
            self.max_skinny, self.max_tiled = FEWEST_W4A16_ROWS - 1, MAX_W4A16_ROWS

    def with_adapters(self, adapters: RowAdapters) -> Linear:
        return AdaptedLinear(self, adapters)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_tiled(x):
            return self.tiled(x)
        return F.linear(x, dequantize_triton(self.quantized, x.dtype), self.bias)

    def _is_tiled(self, x: torch.Tensor) -> bool:
        return self.deterministic or len(x) <= self.max_tiled

    def _is_skinny(self, x: torch.Tensor) -> bool:
        return super()._is_skinny(x) and (self.deterministic or len(x) <= self.max_skinny)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, post_norm: torch.Tensor | None = None, eps: float = 0.0
    ) -> None:
        if post_norm is not None or self._is_skinny(x):
            super().add_to(residual, x, post_norm, eps)
        elif self._is_tiled(x):
            self.tiled(x, residual=residual)
        else:
            residual.add_(self._product(x))

    def _float32_product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """For any number of rows: a head computes only prompts' last ones."""
        return self.tiled(x, out_dtype=torch.float32, out=out)


class QuantizedActivationLinear(QuantizedLinear, ABC, Generic[Rows]):
    """`QuantizedLinear` that also quantizes activations, for some numbers of rows."""

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        activation: Activation,
        gated: bool = True,
        norm: Norm = rms_norm_triton,
    ) -> None:
        super().__init__(weight, bias, activation, False, gated, norm)
        self._activation, self._gated = activation, gated

    @abstractmethod
    def quantizes_rows(self, num_rows: int) -> bool:
        """True if the product of this many rows quantizes them."""

    @property
    @abstractmethod
    def quantize_rows(self) -> Callable[..., Rows]:
        """A function with the arguments of `quantize_fp8_torch`, which quantizes rows for this weight."""

    @abstractmethod
    def multiply(self, x: Rows, dtype: torch.dtype, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The product, or the residual plus the product."""

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(self.quantize_rows(x), x.dtype) if self.quantizes_rows(len(x)) else super()._product(x)

    def _quantize_normed(self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> Rows:
        if norm_weight is None or self.norm is rms_norm_triton:
            return self.quantize_rows(x, norm_weight, eps)
        return self.quantize_rows(self.norm(x, norm_weight, eps))

    def normed(self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        if not self.quantizes_rows(len(x)):
            return super().normed(x, norm_weight, eps)
        return self.multiply(self._quantize_normed(x, norm_weight, eps), x.dtype)

    def gated(self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        if not self.quantizes_rows(len(x)):
            return super().gated(x, norm_weight, eps)
        return self.activate(self.normed(x, norm_weight, eps))

    def gated_into(
        self,
        down: Linear,
        residual: torch.Tensor,
        norm_weight: torch.Tensor | None,
        eps: float,
        post_norm: torch.Tensor | None = None,
    ) -> None:
        num_rows = len(residual)
        if not isinstance(down, QuantizedActivationLinear) or not (
            self.quantizes_rows(num_rows) and down.quantizes_rows(num_rows)
        ):
            return super().gated_into(down, residual, norm_weight, eps, post_norm)
        y = self.normed(residual, norm_weight, eps)
        x = down.quantize_rows(y, activation=self._activation, gated=self._gated)
        down.add_quantized_to(residual, x, post_norm, eps)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, post_norm: torch.Tensor | None = None, eps: float = 0.0
    ) -> None:
        if self.quantizes_rows(len(x)):
            self.add_quantized_to(residual, self.quantize_rows(x), post_norm, eps)
        else:
            super().add_to(residual, x, post_norm, eps)

    def add_quantized_to(self, residual: torch.Tensor, x: Rows, post_norm: torch.Tensor | None, eps: float) -> None:
        """`add_to` for quantized rows."""
        if post_norm is None:
            self.multiply(x, residual.dtype, residual)
        else:
            self.norm(self.multiply(x, residual.dtype), post_norm, eps, residual)


class Fp8Linear(QuantizedActivationLinear[Fp8Activations]):
    """The layer for a weight that `has_fp8_gemm`: activations become fp8 in every step with more than one row.

    Deterministic mode cannot use it, because the library's sums depend on the number of rows."""

    def quantizes_rows(self, num_rows: int) -> bool:
        return num_rows != 1

    @property
    def quantize_rows(self) -> Callable[..., Fp8Activations]:
        return quantize_fp8_triton

    def multiply(self, x: Fp8Activations, dtype: torch.dtype, residual: torch.Tensor | None = None) -> torch.Tensor:
        return multiply_fp8(x, self.quantized, self.bias, residual, dtype)


class Int16Linear(QuantizedActivationLinear[Int16Activations]):
    """The layer for a weight that `has_int_wna16_gemm`: activations become int16 for a medium number of rows."""

    max_skinny = FEWEST_INT16_ROWS - 1

    def quantizes_rows(self, num_rows: int) -> bool:
        return FEWEST_INT16_ROWS <= num_rows <= most_int16_rows(self.quantized)

    @property
    def quantize_rows(self) -> Callable[..., Int16Activations]:
        group_size = 0 if self.quantized.zero_points is None else self.quantized.group_size
        return partial(quantize_int16_triton, group_size=group_size)

    def multiply(self, x: Int16Activations, dtype: torch.dtype, residual: torch.Tensor | None = None) -> torch.Tensor:
        return int_wna16_gemm_triton(x, self.quantized, self.bias, residual, dtype)

    def logits(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not self.quantizes_rows(len(x)):
            return super().logits(x, norm_weight, eps, out)
        rows = self._quantize_normed(x, norm_weight, eps)
        return int_wna16_gemm_triton(rows, self.quantized, self.bias, dtype=torch.float32, out=out)
