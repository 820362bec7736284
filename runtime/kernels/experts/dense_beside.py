"""A feed-forward layer in parallel to a mixture of experts (Gemma 4). Each has a norm before it and one after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from runtime.kernels.experts.moe_torch import ExpertLayer, Router
from runtime.kernels.linear.linear_torch import Linear, Norm


@dataclass(frozen=True, slots=True)
class DenseBeside:
    """The two parts of a layer. The norm of their sum is added to the residual."""

    gate_up: Linear
    down: Linear
    experts: ExpertLayer
    experts_norm: torch.Tensor  # [hidden], before the experts
    post_dense_norm: torch.Tensor
    post_experts_norm: torch.Tensor
    post_norm: torch.Tensor  # after the sum
    norm: Norm
    zeros_like: Callable[[torch.Tensor], torch.Tensor]

    @property
    def router(self) -> Router:
        return self.experts.router

    def add_to(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> None:
        """`ExpertLayer.add_to`; `norm_weight` belongs to the feed-forward layer."""
        total, mixture = self.zeros_like(residual), self.zeros_like(residual)
        self.down.add_to(total, self.gate_up.gated(residual, norm_weight, eps), self.post_dense_norm, eps)
        self.experts.add_to(residual, self.experts_norm, eps, mixture)
        self.norm(mixture, self.post_experts_norm, eps, total)
        self.norm(total, self.post_norm, eps, residual if out is None else out)

    def with_linears(self, change: Callable[[Linear, str], Linear]) -> DenseBeside:
        """This layer with other maps: `change` gets each one with its fused name."""
        return replace(self, gate_up=change(self.gate_up, "dense_gate_up"), down=change(self.down, "dense_down"))
