"""Linear layers of quantized weights on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.kernels.cpu.int_product_torch import int_product_torch
from runtime.kernels.cpu.interleaved_weight import InterleavedWeight
from runtime.kernels.linear.linear_torch import Activate, Linear, Norm


class InterleavedLinear(Linear):
    """The rows of one or several weights with equal columns, which may differ in form.

    Inputs of any dtype are multiplied as quantized float32 rows; outputs have their dtype."""

    def __init__(
        self, parts: Sequence[InterleavedWeight], bias: torch.Tensor | None, norm: Norm, activate: Activate
    ) -> None:
        super().__init__(self._multiply, norm, activate)
        self.parts, self.bias = parts, None if bias is None else bias.float()

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        results = [int_product_torch(x, part) for part in self.parts]
        y = results[0] if len(results) == 1 else torch.cat(results, 1)
        return (y if self.bias is None else y + self.bias).to(x.dtype)
