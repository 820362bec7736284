"""Functions on float32 tensors. A result's bits do not depend on its place in the tensor.

torch's own sigmoid, silu, softplus and rsqrt compute a tensor's last elements with scalar code. It differs in the
last bit from the vector code. torch's exp and log agree, and all other operations here are exactly rounded."""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(x)."""
    return x / (1.0 + torch.exp(-x))


def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)), without overflow."""
    return x.clamp(min=0.0) + torch.log(1.0 + torch.exp(-x.abs()))
