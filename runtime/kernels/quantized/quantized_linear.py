"""Linear layers of weights that are codes, for rows that become codes, too, with the operation before the product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from runtime.kernels.linear.linear_torch import Linear, Norm
from runtime.kernels.norm.gated_activation import Activation
from runtime.kernels.norm.rms_norm import rms_norm_triton
from runtime.kernels.quantized.quantized_weight import QuantizedWeight
from runtime.kernels.quantized.wna16_gemm import QuantizedLinear

Rows = TypeVar("Rows")


class QuantizedActivationLinear(QuantizedLinear, ABC, Generic[Rows]):
    """`QuantizedLinear` whose products of several rows take these as codes; other numbers of rows go as in it."""

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
        """True if so many rows are multiplied as codes."""

    @abstractmethod
    def quantize_rows(
        self,
        x: torch.Tensor,  # [num_rows, K]; with a gated activation [num_rows, 2 * K]
        norm_weight: torch.Tensor | None = None,  # of an RMS norm, which comes first
        eps: float = 0.0,
        activation: Activation | None = None,
        gated: bool = True,
    ) -> Rows:
        """x, its norm or its gated activation as codes for this weight."""

    @abstractmethod
    def multiply(self, x: Rows, dtype: torch.dtype, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The product, or the residual with that added."""

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
        if not (
            self.quantizes_rows(num_rows)
            and isinstance(down, QuantizedActivationLinear)
            and down.quantizes_rows(num_rows)
        ):
            return super().gated_into(down, residual, norm_weight, eps, post_norm)
        y = self.normed(residual, norm_weight, eps)
        codes = down.quantize_rows(y, activation=self._activation, gated=self._gated)
        down.add_quantized_to(residual, codes, post_norm, eps)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, post_norm: torch.Tensor | None = None, eps: float = 0.0
    ) -> None:
        if self.quantizes_rows(len(x)):
            self.add_quantized_to(residual, self.quantize_rows(x), post_norm, eps)
        else:
            super().add_to(residual, x, post_norm, eps)

    def add_quantized_to(self, residual: torch.Tensor, x: Rows, post_norm: torch.Tensor | None, eps: float) -> None:
        """`add_to` for rows that are codes."""
        if post_norm is None:
            self.multiply(x, residual.dtype, residual)
        else:
            self.norm(self.multiply(x, residual.dtype), post_norm, eps, residual)
