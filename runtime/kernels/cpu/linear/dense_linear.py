"""Linear layers with dense weights and float32 rows on a CPU: kernels of `dense_product.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.kernels.cpu.linear.activations import float_rows
from runtime.kernels.cpu.linear.compiled_linear import Around, CompiledLinear
from runtime.kernels.cpu.linear.dense_product import MOST_BLOCKS, dense_product
from runtime.kernels.cpu.linear.pack import packed_blocks
from runtime.kernels.cpu.linear.weight_form import ROWS
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.linear.lora import RowAdapters
from runtime.kernels.llvm.launcher import kernel

_MANY_ROWS = 128  # a weight's conversion pays


class DenseLinear(CompiledLinear):
    """One dense weight."""

    def __init__(
        self,
        weight: torch.Tensor,  # float32 [size_out, size_in]
        bias: torch.Tensor | None,
        around: Around,
    ) -> None:
        super().__init__(around)
        self.values, (self.size_out, self.size_in) = packed_blocks(weight), weight.shape
        self.is_whole = self.size_out % ROWS == 0
        self.bias = None if bias is None else F.pad(bias.float(), (0, -len(bias) % ROWS)).contiguous()

    def multiply(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        out = self.launcher.buffer(name, len(rows), len(self.values) * ROWS)
        self.multiply_into(out, rows, adds=False)
        return out[:, : self.size_out]

    def multiply_into(self, out: torch.Tensor, rows: torch.Tensor, adds: bool) -> None:
        num_rows, num_blocks, dtype = len(rows), len(self.values), self.values.dtype
        parts = self.launcher.parts(-(-num_blocks // MOST_BLOCKS), num_rows * self.values.numel())
        converted = None
        if num_rows >= _MANY_ROWS and dtype != torch.float32:
            converted = self.launcher.buffer("blocks", parts, MOST_BLOCKS * ROWS * self.size_in)
        constants = {"dtype": dtype, "is_one_row": num_rows == 1, "converts": converted is not None, "adds": adds}
        function = kernel(dense_product, has_bias=self.bias is not None, **constants)
        sizes = num_rows, num_blocks, self.size_in, rows.stride(0), out.stride(0)
        self.launcher.launch(function, (self.values, rows, self.bias, converted, out, *sizes), parts)

    def prepared(
        self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, activation: str, gated: bool
    ) -> torch.Tensor:
        if norm_weight is None and not activation:
            return x
        if self.size_in % ROWS:  # a tiny model's
            return self.activate(x) if norm_weight is None else self.norm(x, norm_weight, eps)
        return self._rows(x, norm_weight, eps, activation, gated)

    def _rows(
        self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, activation: str, gated: bool
    ) -> torch.Tensor:
        """Rows of x after the norm or the activation, in a buffer."""
        (num_rows, columns), launcher = x.shape, self.launcher
        columns = columns // 2 if activation and gated else columns
        out = launcher.buffer("activated" if activation else "norm", num_rows, columns)
        function = kernel(float_rows, has_norm=norm_weight is not None, activation=activation, gated=gated)
        arguments = (x, norm_weight, out, num_rows, columns, x.stride(0), eps)
        launcher.launch(function, arguments, launcher.parts(num_rows, 8 * out.numel()))
        return out

    def with_adapters(self, adapters: RowAdapters) -> Linear:
        """The norm is a kernel here, too: rows without an adapter keep their bits next to rows with one."""
        adapted = super().with_adapters(adapters)
        adapted.norm = self._norm_alone
        return adapted

    def _norm_alone(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        if residual is not None:
            self._add_normed(residual, x, weight, eps)
            return residual
        normed: torch.Tensor = self.normed_rows(x, weight, eps)
        return normed.to(x.dtype)
