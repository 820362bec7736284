"""Linear layers on a GPU: fused kernels up to 16 rows, cuBLAS above."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from runtime.kernels.linear.batch_invariant_linear import batch_invariant_linear_triton
from runtime.kernels.linear.linear_torch import AdaptedLinear, Linear, Norm
from runtime.kernels.linear.lora import RowAdapters
from runtime.kernels.linear.skinny_gemm import MAX_ROWS, skinny_gemm_triton
from runtime.kernels.norm.gated_activation import Activation, gated_activation_triton
from runtime.kernels.norm.rms_norm import rms_norm_triton


class FusedLinear(Linear):
    """`Linear` in the fewest launches: one or two kernels for each method up to MAX_ROWS rows.

    Above, the product itself adds the residual. In deterministic mode, all products of a weight sum in one order, and
    all other operations work row by row."""

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation,
        deterministic: bool,
        gated: bool = True,
        norm: Norm = rms_norm_triton,
    ) -> None:
        super().__init__(self._any_product, norm, partial(gated_activation_triton, activation=activation, gated=gated))
        self.weight, self.bias, self.deterministic = weight, bias, deterministic
        self.folded = activation if gated else None  # the activation that the skinny kernel can include
        self.skinny_gemm = partial(skinny_gemm_triton, weight=weight, bias=bias, fixed_order=deterministic)

    def _is_skinny(self, x: torch.Tensor) -> bool:
        return len(x) <= MAX_ROWS and not (self.deterministic and x.dtype == torch.float32)

    def _skinny_normed(
        self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, **options: Any
    ) -> torch.Tensor:
        if norm_weight is None or self.norm is rms_norm_triton:
            return self.skinny_gemm(x, norm_weight=norm_weight, eps=eps, **options)
        return self.skinny_gemm(self.norm(x, norm_weight, eps), **options)

    def _any_product(self, x: torch.Tensor) -> torch.Tensor:
        return self.skinny_gemm(x) if self._is_skinny(x) else self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.deterministic:
            return batch_invariant_linear_triton(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, post_norm: torch.Tensor | None = None, eps: float = 0.0
    ) -> None:
        if post_norm is not None:
            self.norm(self.product(x), post_norm, eps, residual)
        elif self._is_skinny(x):
            self.skinny_gemm(x, residual=residual)
        elif self.deterministic:
            batch_invariant_linear_triton(x, self.weight, self.bias, residual=residual)
        elif self.bias is not None:
            super().add_to(residual, x)
        else:
            residual.addmm_(x, self.weight.t())

    def normed(self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        if self._is_skinny(x):
            return self._skinny_normed(x, norm_weight, eps)
        return super().normed(x, norm_weight, eps)

    def gated(self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        if not self._is_skinny(x):
            return super().gated(x, norm_weight, eps)
        y = self._skinny_normed(x, norm_weight, eps, activation=self.folded)
        return self.activate(y) if self.folded is None else y

    def with_adapters(self, adapters: RowAdapters) -> Linear:
        one_row = len(adapters.rows) == 1 and not self.deterministic
        return FusedAdaptedLinear(self, adapters) if one_row else AdaptedLinear(self, adapters)

    def logits(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits in float32: rounded to bfloat16, the best two of 128,000 are often equal."""
        if self._is_skinny(x):
            return self._skinny_normed(x, norm_weight, eps, out_dtype=torch.float32, out=out)
        return self._float32_product(self.norm(x, norm_weight, eps), out)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        return self.skinny_gemm(x, out_dtype=torch.float32) if self._is_skinny(x) else self._float32_product(x)

    def _float32_product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        weight, bias, wide = self.weight, self.bias, torch.float32
        if self.deterministic:
            return batch_invariant_linear_triton(x, weight, bias, wide, out)
        if x.dtype == wide or bias is not None or not x.is_cuda:
            result = F.linear(x, weight, bias).float()
            return result if out is None else out.copy_(result)
        if out is None:
            return torch.mm(x, weight.t(), out_dtype=wide)
        return torch.mm(x, weight.t(), out_dtype=wide, out=out)


class FusedAdaptedLinear(FusedLinear):
    """`FusedLinear` for a step of one row with an adapter, which the product's own kernel applies."""

    def __init__(self, own: FusedLinear, adapters: RowAdapters) -> None:
        Linear.__init__(self, self._any_product, own.norm, own.activate)
        self.weight, self.bias, self.deterministic, self.folded = own.weight, own.bias, False, own.folded
        self.skinny_gemm = partial(own.skinny_gemm, adapters=adapters)
