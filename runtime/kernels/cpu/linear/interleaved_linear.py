"""Linear layers with quantized weights on a CPU: kernels of `int_product.py`, with the norm, the activation and the
residual around them. Rows are float32 between kernels; a model in another dtype converts at the borders."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.kernels.cpu.linear.activations import add_normed, quantize_rows
from runtime.kernels.cpu.linear.int_product import int_product
from runtime.kernels.cpu.linear.int_product_torch import QuantizedRows
from runtime.kernels.cpu.linear.interleaved_weight import COLUMNS, ROWS, InterleavedWeight
from runtime.kernels.linear.linear_torch import Activate, Linear, Norm
from runtime.kernels.llvm.launcher import Launcher, kernel
from runtime.kernels.norm.gated_activation import Activation
from runtime.kernels.norm.rms_norm import rms_norm_torch

_FEW_ROWS, _MANY_ROWS = (1,), (4, 2, 1)  # numbers of rows that share a read of the weight


class InterleavedLinear(Linear):
    """One or several weights that multiply the same input; their outputs lie one after the other."""

    def __init__(
        self,
        parts: Sequence[InterleavedWeight],
        bias: torch.Tensor | None,
        launcher: Launcher,
        norm: Norm,
        activate: Activate,
        activation: Activation,
        gated: bool,
        num_limbs: int = 2,  # 2 for int16 activations, 1 for int8
    ) -> None:
        super().__init__(self._fresh_product, norm, activate)
        self.parts, self.launcher, self.activation, self.is_gated = tuple(parts), launcher, activation, gated
        self.num_limbs = num_limbs
        self.size_in, self.size_out = parts[0].shape[1], sum(part.shape[0] for part in parts)
        # Kernels write whole blocks of 16 outputs, so parts between others must consist of them.
        self._is_whole = all(part.shape[0] % ROWS == 0 for part in parts)
        self.bias = None if bias is None else bias.float()
        sizes = [part.shape[0] for part in parts]
        biases = [None] * len(parts) if bias is None else bias.float().split(sizes)
        self._biases = [None if own is None else _padded(own) for own in biases]

    def normed(self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        return self._multiply(self._quantized(x, norm_weight, eps), "normed").to(x.dtype)

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
        if isinstance(down, InterleavedLinear):
            down._add(residual, down._activated(gate_up, self.activation, self.is_gated), post_norm, eps)
        else:
            down.add_to(residual, self.activate(gate_up), post_norm, eps)

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, post_norm: torch.Tensor | None = None, eps: float = 0.0
    ) -> None:
        self._add(residual, self._quantized(x, None, 0.0), post_norm, eps)

    def logits(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._multiply(self._quantized(x, norm_weight, eps), "logits")

    def _fresh_product(self, x: torch.Tensor) -> torch.Tensor:
        """The product alone, in memory of its own."""
        return self._multiply(self._quantized(x, None, 0.0), "product").to(x.dtype, copy=True)

    def _add(self, residual: torch.Tensor, rows: QuantizedRows, post_norm: torch.Tensor | None, eps: float) -> None:
        """Add the product, or its norm, to the residual."""
        takes_sums = residual.dtype == torch.float32 and residual.is_contiguous() and self._is_whole
        if post_norm is None and takes_sums:
            self._multiply_into(residual, rows, adds=True)
            return
        y = self._multiply(rows, "added")
        if post_norm is None:
            residual.add_(y)
        elif self.norm is rms_norm_torch and takes_sums and post_norm.dtype == torch.float32:
            _add_norm(self.launcher, y, post_norm, residual, eps)
        else:
            self.norm(y.to(residual.dtype), post_norm, eps, residual)

    def _multiply(self, rows: QuantizedRows, name: str) -> torch.Tensor:
        """The product [rows, size_out] in the buffer of this name."""
        num_rows = len(rows.scales)
        if self._is_whole or len(self.parts) == 1:
            out = self.launcher.buffer(name, num_rows, -(-self.size_out // ROWS) * ROWS)
            self._multiply_into(out, rows, adds=False)
            return out[:, : self.size_out]
        outs = []
        for index, part in enumerate(self.parts):
            out = self.launcher.buffer(f"{name} {index}", num_rows, len(part.values) * ROWS)
            self._launch(part, out, 0, rows, None, adds=False)
            outs.append(out[:, : part.shape[0]])
        y = torch.cat(outs, 1)
        return y if self.bias is None else y.add_(self.bias)

    def _multiply_into(self, out: torch.Tensor, rows: QuantizedRows, adds: bool) -> None:
        at = 0
        for part, bias in zip(self.parts, self._biases, strict=True):
            self._launch(part, out, at, rows, bias, adds)
            at += part.shape[0]

    def _launch(
        self, part: InterleavedWeight, out: torch.Tensor, at: int, rows: QuantizedRows, bias: torch.Tensor | None,
        adds: bool,
    ) -> None:  # fmt: skip
        num_rows, num_chunks = rows.scales.shape
        function = kernel(
            int_product,
            form=part.form,
            limbs=self.num_limbs,
            tiles=_FEW_ROWS if num_rows == 1 else _MANY_ROWS,
            adds=adds,
            has_bias=bias is not None,
        )
        num_blocks = len(part.values)
        arguments = (
            part.values, part.scales, part.minimums, part.super_scales, part.super_minimums, rows.limbs, rows.scales,
            rows.sums, bias, out[:, at:], num_rows, num_blocks, num_chunks, out.shape[1],
        )  # fmt: skip
        work = num_rows * num_blocks * num_chunks * ROWS * COLUMNS
        self.launcher.launch(function, arguments, self.launcher.parts(num_blocks, work))

    def _quantized(self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float) -> QuantizedRows:
        """Rows of x, perhaps after the norm."""
        if norm_weight is not None and (self.norm is not rms_norm_torch or norm_weight.dtype != torch.float32):
            x, norm_weight = self.norm(x, norm_weight, eps), None
        return self._quantize(x, norm_weight, eps, "", False)

    def _activated(self, gate_up: torch.Tensor, activation: Activation, gated: bool) -> QuantizedRows:
        """The gated activation of rows."""
        return self._quantize(gate_up, None, 0.0, activation, gated)

    def _quantize(
        self, x: torch.Tensor, norm_weight: torch.Tensor | None, eps: float, activation: str, gated: bool
    ) -> QuantizedRows:
        x = x.float()
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows, chunks, launcher = len(x), self.size_in // COLUMNS, self.launcher
        rows = QuantizedRows(
            launcher.buffer("limbs", num_rows, chunks, self.num_limbs, COLUMNS, dtype=torch.int8),
            launcher.buffer("scales", num_rows, chunks),
            launcher.buffer("sums", num_rows, chunks, 2, dtype=torch.int32),
        )
        function = kernel(
            quantize_rows,
            num_limbs=self.num_limbs,
            has_norm=norm_weight is not None,
            activation=activation,
            gated=gated,
        )
        arguments = (x, norm_weight, *rows, num_rows, self.size_in, x.stride(0), eps)
        launcher.launch(function, arguments, launcher.parts(num_rows, 8 * num_rows * self.size_in))
        return rows


def _add_norm(launcher: Launcher, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, eps: float) -> None:
    """Add the RMS norm of rows x to the residual."""
    num_rows, columns = residual.shape
    arguments = (x, weight, residual, num_rows, columns, x.stride(0), eps)
    launcher.launch(kernel(add_normed), arguments, launcher.parts(num_rows, 4 * num_rows * columns))


def _padded(bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(bias, (0, -len(bias) % ROWS)).contiguous()
