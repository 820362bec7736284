"""Mixtures of experts with any weights: one expert after another, on the tokens that chose it.

This is the torch twin of the grouped kernels, and the mixture of a CPU. The results of a token's experts are added in
the order of its preference, so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Protocol, TypeVar

import torch

from runtime.kernels.linear.linear_torch import Activate, Linear, Product
from runtime.spec.decoder_spec import ExpertsSpec

W = TypeVar("W")


class ExpertLayer(Protocol):
    """A mixture of experts with its weights."""

    def add_to(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> None:
        """Add the mixture of norm(residual) to `out`, or to the residual without it; both [num_tokens, hidden]."""


class Experts:
    """One expert after another, for any weights that `product` takes.

    An expert has gate and up as one weight [2 * ffn, hidden], and down [hidden, ffn]."""

    def __init__(
        self,
        spec: ExpertsSpec,
        router: Linear,
        weights: Iterable[tuple[W, W]],
        product: Callable[[W], Product],
        activate: Activate,
    ) -> None:
        self.spec, self.router, self.activate = spec, router, activate
        self.experts = [(product(gate_up), product(down)) for gate_up, down in weights]

    def add_to(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> None:
        """`ExpertLayer.add_to`."""
        total = self.mixture(residual, norm_weight, eps)
        (residual if out is None else out).add_(total.to(residual.dtype))

    def mixture(self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The mixture of norm(residual) in float32, as wide as the product with down."""
        x = self.router.norm(residual, norm_weight, eps)
        ids, weights = route_torch(self.router.product(x), self.spec)
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=self.spec.num_experts).tolist()
        results = x.new_empty(0)
        for (gate_up, down), choices in zip(self.experts, order.split(counts), strict=True):
            if len(choices):
                y = down(self.activate(gate_up(x[choices // self.spec.top_k])))
                results = results if len(results) else y.new_empty(len(order), y.shape[1])
                results[choices] = y
        ordered = results.view(*ids.shape, -1).unbind(1)
        # Products and sums are separate operations, so that each is rounded exactly.
        return reduce(torch.add, (y * w[:, None] for y, w in zip(ordered, weights.unbind(1), strict=True)))


def route_torch(logits: torch.Tensor, spec: ExpertsSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [num_tokens, num_experts] -> ids and fp32 weights [num_tokens, top_k], best first."""
    weights, ids = logits.float().softmax(-1).topk(spec.top_k, -1)
    return ids, weights / weights.sum(-1, keepdim=True) if spec.normalized else weights
