"""Linear layers with quantized weights on a CPU: kernels of `int_product.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.kernels.cpu.linear.activations import quantize_rows
from runtime.kernels.cpu.linear.compiled_linear import Around, CompiledLinear
from runtime.kernels.cpu.linear.int_product import int_product
from runtime.kernels.cpu.linear.int_product_torch import QuantizedRows
from runtime.kernels.cpu.linear.interleaved_weight import InterleavedWeight
from runtime.kernels.cpu.linear.weight_form import COLUMNS, ROWS, row_span
from runtime.kernels.llvm.launcher import Launcher, kernel


class InterleavedLinear(CompiledLinear):
    """One or several weights that multiply the same input; their outputs lie one after the other."""

    def __init__(
        self,
        parts: Sequence[InterleavedWeight],
        bias: torch.Tensor | None,
        around: Around,
        num_limbs: int = 2,  # 2 for int16 activations, 1 for int8
    ) -> None:
        super().__init__(around)
        self.parts, self.num_limbs = tuple(parts), num_limbs
        self.span = row_span(8 * num_limbs, *(part.form for part in parts))  # columns of rows that share a scale
        self.size_in, self.size_out = parts[0].shape[1], sum(part.shape[0] for part in parts)
        # Kernels write whole blocks of 16 outputs, so parts between others must consist of such blocks.
        self.is_whole = all(part.shape[0] % ROWS == 0 for part in parts)
        self.bias = None if bias is None else bias.float()
        sizes = [part.shape[0] for part in parts]
        biases = [None] * len(parts) if bias is None else bias.float().split(sizes)
        self.biases = [None if own is None else _padded(own) for own in biases]

    def multiply(self, rows: QuantizedRows, name: str) -> torch.Tensor:
        num_rows = rows.scales.shape[1]
        if self.is_whole or len(self.parts) == 1:
            out = self.launcher.buffer(name, num_rows, -(-self.size_out // ROWS) * ROWS)
            self.multiply_into(out, rows, adds=False)
            return out[:, : self.size_out]
        outs = []
        for index, part in enumerate(self.parts):
            out = self.launcher.buffer(f"{name} {index}", num_rows, len(part.values) * ROWS)
            self._launch(part, out, 0, rows, None, adds=False)
            outs.append(out[:, : part.shape[0]])
        y = torch.cat(outs, 1)
        return y if self.bias is None else y.add_(self.bias)

    def multiply_into(self, out: torch.Tensor, rows: QuantizedRows, adds: bool) -> None:
        at = 0
        for part, bias in zip(self.parts, self.biases, strict=True):
            self._launch(part, out, at, rows, bias, adds)
            at += part.shape[0]

    def _launch(
        self, part: InterleavedWeight, out: torch.Tensor, at: int, rows: QuantizedRows, bias: torch.Tensor | None,
        adds: bool,
    ) -> None:  # fmt: skip
        num_chunks, num_rows = rows.scales.shape
        function = kernel(
            int_product,
            form=part.form,
            limbs=self.num_limbs,
            is_one_row=num_rows == 1,
            adds=adds,
            has_bias=bias is not None,
        )
        num_blocks = len(part.values)
        arguments = (
            *part.tensors, rows.limbs, rows.scales, rows.sums, bias, out[:, at:], num_rows, num_blocks, num_chunks,
            out.shape[1],
        )  # fmt: skip
        work = num_rows * num_blocks * num_chunks * ROWS * COLUMNS
        self.launcher.launch(function, arguments, self.launcher.parts(num_blocks, work))

    def prepared(
        self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, activation: str, gated: bool
    ) -> QuantizedRows:
        return quantized_rows(
            self.launcher, x, self.size_in, (self.num_limbs, self.span), norm_weight, eps, activation, gated
        )


def quantized_rows(
    launcher: Launcher,
    x: torch.Tensor,  # float32 [rows, at least size_in]
    size_in: int,
    precision: tuple[int, int],  # limbs of a number, and columns that share a scale
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    activation: str = "",
    gated: bool = False,
) -> QuantizedRows:
    """Rows for a product, after the norm or the activation; valid until the next call."""
    (num_limbs, span), num_rows, chunks = precision, len(x), size_in // COLUMNS
    rows = QuantizedRows(
        launcher.buffer(f"limbs {span}", chunks, num_rows, num_limbs, COLUMNS, dtype=torch.int8),
        launcher.buffer(f"scales {span}", chunks, num_rows),
        launcher.buffer(f"sums {span}", chunks, num_rows, num_limbs, 2, dtype=torch.int16),
    )
    has_norm = norm_weight is not None
    chosen = {"has_norm": has_norm, "activation": activation, "gated": gated}
    function = kernel(quantize_rows, num_limbs=num_limbs, span=span, **chosen)
    arguments = (x, norm_weight, *rows, num_rows, size_in, x.stride(0), eps)
    launcher.launch(function, arguments, launcher.parts(num_rows, 8 * num_rows * size_in))
    return rows


def _padded(bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(bias, (0, -len(bias) % ROWS)).contiguous()
