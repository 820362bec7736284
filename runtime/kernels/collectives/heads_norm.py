"""RMS norms of q and k over all their heads, which tensor-parallel ranks divide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from runtime.kernels.collectives.all_reduce import sum_partials_torch
from runtime.kernels.collectives.communicator import Communicator


class HeadsWeight(NamedTuple):
    """One norm's weight."""

    weight: torch.Tensor  # [num_heads * head_dim] for this rank's heads
    leaves: Sequence[int]  # lengths of pieces that are summed one by one, the same for any number of ranks


class HeadsNorm:
    """The q and k norms within the qkv product, in place.

    A single rank calls `norm`. Several ranks, each with the same number of heads, add up q's and k's square sums
    in one all-reduce."""

    def __init__(
        self,
        weights: Sequence[HeadsWeight],  # q's and k's
        eps: float,
        norm: Callable[[torch.Tensor, torch.Tensor, float], None] | None,  # works in place
        communicator: Communicator,
    ) -> None:
        self.weights, self.eps, self.communicator = weights, eps, communicator
        self.norm = norm  # None if sums are taken by leaves or over ranks

    def __call__(self, qkv: torch.Tensor) -> None:
        """Normalise the q and k columns in qkv [num_tokens, width of q, k and v]."""
        q_width, k_width = (len(own.weight) for own in self.weights)
        parts = qkv[:, :q_width], qkv[:, q_width : q_width + k_width]
        if self.norm is not None:
            for part, (weight, _) in zip(parts, self.weights, strict=True):
                self.norm(part, weight, self.eps)
            return
        pairs = [(part, *own) for part, own in zip(parts, self.weights, strict=True)]
        squares = [[leaf.float().square().sum(1) for leaf in part.split(leaves, 1)] for part, _, leaves in pairs]
        sums = torch.stack([sum_partials_torch(own, tree=True) for own in squares], 1)
        for (part, weight, _), total in zip(pairs, self.communicator.reduced(sums).unbind(1), strict=True):
            scale = (total / (self.communicator.size * part.shape[1]) + self.eps).rsqrt()
            part.copy_(part.float() * scale[:, None] * weight.float())
