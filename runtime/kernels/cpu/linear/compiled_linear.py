"""Linear layers on a CPU as compiled kernels: the norm, the activation and the residual around a product.

Rows are float32 between kernels; a model in another dtype converts at the borders."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch

from runtime.kernels.cpu.rows import norm_rows
from runtime.kernels.linear.linear_torch import Activate, Linear, Norm
from runtime.kernels.llvm.launcher import Launcher, kernel
from runtime.kernels.norm.gated_activation import Activation
from runtime.kernels.norm.rms_norm import rms_norm_torch


class Around(NamedTuple):
    """What the layers of a model compute around their products."""

    launcher: Launcher
    norm: Norm
    activate: Activate
    activation: Activation
    gated: bool


class CompiledLinear(Linear):
    """A layer that first prepares the rows for its product, in one pass with the norm or the activation before it."""

    size_in: int
    size_out: int
    is_whole: bool  # the product consists of whole blocks, so it may be added to a residual

    def __init__(self, around: Around) -> None:
        super().__init__(None, around.norm, around.activate)
        self.launcher, self.activation, self.is_gated = around.launcher, around.activation, around.gated

    @abstractmethod
    def prepared(
        self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, activation: str, gated: bool
    ) -> Any:
        """Float32 rows of x for the product, after an RMS norm or an activation if they are given."""

    @abstractmethod
    def multiply(self, rows: Any, name: str) -> torch.Tensor:
        """The product [rows, size_out] in the buffer of this name."""

    @abstractmethod
    def multiply_into(self, out: torch.Tensor, rows: Any, adds: bool) -> None:
        """Write the product to `out` [rows, whole blocks], or add it."""

    def normed(self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """As for every layer; the result is valid until the next call for a layer of these sizes."""
        name = f"normed {self.size_in} {self.size_out}"
        return self.multiply(self.normed_rows(x, norm_weight, eps), name).to(x.dtype)

    def gated(self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        return self.activate(self.normed(x, norm_weight, eps))

    def gated_into(
        self,
        down: Linear,
        residual: torch.Tensor,
        norm_weight: torch.Tensor | None,
        eps: float,
        post_norm: torch.Tensor | None = None,
    ) -> None:
        gate_up = self.normed(residual, norm_weight, eps)
        if isinstance(down, CompiledLinear):
            rows = down.prepared(gate_up.float(), None, 0.0, self.activation, self.is_gated)
            down._add(residual, rows, post_norm, eps)
        else:
            down.add_to(residual, self.activate(gate_up), post_norm, eps)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, post_norm: torch.Tensor | None = None, eps: float = 0.0
    ) -> None:
        self._add(residual, self.normed_rows(x, None, 0.0), post_norm, eps)

    def logits(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.multiply(self.normed_rows(x, norm_weight, eps), "logits")

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The product alone, in memory of its own. As an attribute it would keep a layer alive that is replaced."""
        return self.multiply(self.normed_rows(x, None, 0.0), "product").to(x.dtype, copy=True)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(self.normed_rows(x, None, 0.0), "product").clone()

    def normed_rows(self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> Any:
        """Rows of x, perhaps after the norm."""
        if norm_weight is not None and (self.norm is not rms_norm_torch or norm_weight.dtype != torch.float32):
            x, norm_weight = self.norm(x, norm_weight, eps), None
        x = x.float()
        return self.prepared(x if x.stride(1) == 1 else x.contiguous(), norm_weight, eps, "", False)

    def _add(self, residual: torch.Tensor, rows: Any, post_norm: torch.Tensor | None, eps: float) -> None:
        """Add the product, or its norm, to the residual."""
        takes_sums = residual.dtype == torch.float32 and residual.is_contiguous() and self.is_whole
        if post_norm is None and takes_sums:
            self.multiply_into(residual, rows, adds=True)
            return
        y = self.multiply(rows, "added")
        if post_norm is None:
            residual.add_(y)
        else:
            self._add_normed(residual, y, post_norm, eps)

    def _add_normed(self, residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """Add the norm of rows x to the residual."""
        is_kernel = residual.dtype == weight.dtype == torch.float32 and residual.is_contiguous() and self.is_whole
        if not is_kernel or self.norm is not rms_norm_torch:
            self.norm(x.to(residual.dtype), weight, eps, residual)
            return
        (num_rows, columns), launcher = residual.shape, self.launcher
        arguments = (x, weight, residual, num_rows, columns, x.stride(0), columns, eps)
        launcher.launch(kernel(norm_rows, adds=True), arguments, launcher.parts(num_rows, 4 * num_rows * columns))
