"""CompiledRows: the operations between the products of a layer, as kernels. Torch computes what they do not take."""

from __future__ import annotations

import torch

from runtime.kernels.cpu.linear.activations import float_rows
from runtime.kernels.cpu.rows import activate_rows, cap_rows, clear, multiply_rows, norm_rows
from runtime.kernels.linear.linear_torch import Activate, Norm, soft_cap_torch
from runtime.kernels.llvm.launcher import Launcher, kernel
from runtime.kernels.norm.gated_activation import Activation
from runtime.kernels.norm.rms_norm import rms_norm_in_place_torch, rms_norm_torch

_LANES = 16


class CompiledRows:
    """Operations on float32 rows. `norm` and `activate` are references."""

    def __init__(self, launcher: Launcher, norm: Norm, activate: Activate, activation: Activation, gated: bool) -> None:
        self.launcher, self._norm, self._activate = launcher, norm, activate
        self._activation, self._gated = activation, gated

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`rms_norm_torch`, or the reference for another norm."""
        if self._norm is not rms_norm_torch or not _are_rows(x, weight) or not _is_whole(residual):
            return self._norm(x, weight, eps, residual)
        (num_rows, columns), launcher = x.shape, self.launcher
        parts = launcher.parts(num_rows, 8 * x.numel())
        if residual is not None:
            arguments = (x, weight, residual, num_rows, columns, x.stride(0), columns, eps)
            launcher.launch(kernel(norm_rows, adds=True), arguments, parts)
            return residual
        out = torch.empty(x.shape)
        function = kernel(float_rows, has_norm=True, activation="", gated=False)  # the kernel that `DenseLinear` has
        launcher.launch(function, (x, weight, out, num_rows, columns, x.stride(0), eps), parts)
        return out

    def norm_in_place(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """`rms_norm_in_place_torch`."""
        if not _are_rows(x, weight):
            rms_norm_in_place_torch(x, weight, eps)
            return
        arguments = (x, weight, x, *x.shape, x.stride(0), x.stride(0), eps)
        self.launcher.launch(kernel(norm_rows, adds=False), arguments, self.launcher.parts(len(x), 8 * x.numel()))

    def activate(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of a feed-forward layer: [rows, 2 * columns] with a gate -> [rows, columns]."""
        if not _are_rows(x):
            return self._activate(x)
        return self._activated(*x.chunk(2, 1)) if self._gated else self._activated(x, None)

    def gate_by(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """activation(gate) * up, of rows that lie apart."""
        if not _are_rows(gate) or not _are_rows(up):
            return self._activate(torch.cat((gate, up), 1))
        return self._activated(gate, up)

    def _activated(self, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        """Rows of any length: a number has the same bits in each, so ranks agree."""
        (num_rows, columns), out = gate.shape, torch.empty(gate.shape)
        arguments = (gate, up, out, num_rows, columns, gate.stride(0), 0 if up is None else up.stride(0))
        function = kernel(activate_rows, activation=self._activation, has_up=up is not None)
        self.launcher.launch(function, arguments, self.launcher.parts(num_rows, 16 * out.numel()))
        return out

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """`soft_cap_torch`, in place."""
        if not _are_rows(x):
            return soft_cap_torch(x, cap)
        parts = self.launcher.parts(-(-x.shape[1] // _LANES), 16 * x.numel())
        self.launcher.launch(kernel(cap_rows), (x, *x.shape, x.stride(0), cap), parts)
        return x

    def multiply(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """x times one number, in place."""
        if not _is_whole(x) or factor.dtype != torch.float32:
            return x.mul_(factor)
        self.launcher.launch(kernel(multiply_rows), (x, factor, x.numel()), self.launcher.parts(x.numel(), x.numel()))
        return x

    def zeros_like(self, x: torch.Tensor) -> torch.Tensor:
        """Zeros of this shape."""
        if not _is_whole(x):
            return torch.zeros_like(x)
        out = torch.empty(x.shape)
        self.launcher.launch(kernel(clear), (out, out.numel()), self.launcher.parts(out.numel(), out.numel()))
        return out


def _are_rows(x: torch.Tensor, weight: torch.Tensor | None = None) -> bool:
    """True for contiguous float32 rows. With a norm's weight, they also consist of whole vectors."""
    fits = x.dtype == torch.float32 and x.stride(1) == 1
    return fits and (weight is None or (weight.dtype == torch.float32 and x.shape[1] % _LANES == 0))


def _is_whole(x: torch.Tensor | None) -> bool:
    """True for contiguous float32 numbers, or none."""
    return x is None or (x.dtype == torch.float32 and x.is_contiguous())
