"""Projectors: the steps from a tower's outputs to embeddings in the decoder's hidden states.

Each step maps [pictures, rows, columns, size]. `TowerSpec.projector` names them in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Operation = Callable[[torch.Tensor], torch.Tensor]
ACTIVATIONS: dict[str, Operation] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True, eq=False)
class Map:
    """A linear map."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None
    limits: tuple[float, ...] = ()  # inputs' minimum and maximum, then outputs'; empty without limits

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.weight.dtype)
        if not self.limits:
            return F.linear(x, self.weight, self.bias)
        low, high, out_low, out_high = self.limits
        return F.linear(x.clamp(low, high), self.weight, self.bias).clamp(out_low, out_high)


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A layer norm, or an RMSNorm without a bias."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            assert self.weight is not None
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide if self.weight is None else wide * self.weight.float()).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class FeedForward:
    """Two maps with an activation between them, or three with a gate."""

    gate: Map | None
    up: Map
    down: Map
    activation: Operation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        return self.down(self.activation(inner) if self.gate is None else self.activation(self.gate(x)) * inner)


def blocks(x: torch.Tensor, merge: int) -> torch.Tensor:
    """Split [pictures, rows, columns, size] into [pictures, rows / merge, columns / merge, merge, merge, size]."""
    pictures, rows, columns, size = x.shape
    return x.reshape(pictures, rows // merge, merge, columns // merge, merge, size).transpose(2, 3)


# operations on blocks of patches
RESHAPES: dict[str, Callable[[int, torch.Tensor], torch.Tensor]] = {
    "blocks": lambda merge, x: blocks(x, merge).flatten(3),  # patches end to end
    "channels": lambda merge, x: blocks(x, merge).movedim(-1, 3).flatten(3),  # each channel's patches end to end
    "mean": lambda merge, x: blocks(x, merge).float().mean((3, 4)).to(x.dtype),
    "root": lambda merge, x: x.float() * x.shape[-1] ** 0.5,
}


def chain(operations: Iterable[Operation], x: torch.Tensor) -> torch.Tensor:
    """Apply operations in order."""
    for operation in operations:
        x = operation(x)
    return x
