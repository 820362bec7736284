"""Linear layers and mixtures divided over ranks, and maps in leaves for `EngineConfig.rank_invariant`.

Each rank has some inputs of a divided map, and the result is the sum over ranks. A leaf is an eighth of a map. Groups
with 1, 2, 4 and 8 ranks compute the same leaves with calls in the same shapes, which round alike. They add partial sums
as the same binary tree, so the bits do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.kernels.collectives.all_reduce import sum_partials_torch
from runtime.kernels.collectives.communicator import Communicator
from runtime.kernels.experts.moe_torch import ExpertLayer, Experts, Router
from runtime.kernels.linear.linear_torch import Linear, Product
from runtime.kernels.linear.lora import RowAdapters


class ReducedLinear(Linear):
    """A linear layer that sums the products of all ranks."""

    def __init__(self, own: Linear, communicator: Communicator) -> None:
        super().__init__(own.product, own.norm, own.activate)
        self.communicator = communicator

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, post_norm: torch.Tensor | None = None, eps: float = 0.0
    ) -> None:
        partial = self.product(x)
        if post_norm is None:
            self.communicator.add_reduced(residual, partial)
        else:
            self.norm(self.communicator.reduced(partial).to(x.dtype), post_norm, eps, residual)

    def with_adapters(self, adapters: RowAdapters) -> Linear:
        """Adapters are divided like the weight, so a rank's addition belongs to the sum, too."""
        return ReducedLinear(super().with_adapters(adapters), self.communicator)


class ReducedExperts:
    """A mixture in which each rank has some of each expert's intermediate values."""

    def __init__(self, own: ExpertLayer, communicator: Communicator) -> None:
        self.own, self.communicator = own, communicator

    @property
    def router(self) -> Router:
        return self.own.router

    def add_to(
        self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> None:
        """`ExpertLayer.add_to` of the sum over ranks."""
        self.communicator.add_reduced(residual if out is None else out, self.partial(residual, norm_weight, eps))

    def partial(self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
        """This rank's part of the sum, [num_tokens, hidden]."""
        partial = torch.zeros_like(residual)
        self.own.add_to(residual, norm_weight, eps, partial)
        return partial


class ExpertLeaves(ReducedExperts):
    """A mixture with a `down` product of several leaves (`by_leaves_of_inputs`)."""

    def __init__(self, own: Experts, num_leaves: int, communicator: Communicator) -> None:
        super().__init__(own, communicator)
        self.mixture, self.num_leaves = own.mixture, num_leaves

    def partial(self, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
        return sum_of_leaves(self.mixture(residual, norm_weight, eps), self.num_leaves)


class ColumnLeaves(Linear):
    """A linear layer as leaves of its outputs."""

    def __init__(self, leaves: Sequence[Linear]) -> None:
        products = [leaf.product for leaf in leaves]
        super().__init__(
            lambda x: torch.cat([product(x) for product in products], 1), leaves[0].norm, leaves[0].activate
        )
        self.leaves = leaves

    def logits(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        results = []
        for leaf in self.leaves:
            result = leaf.logits(x, norm_weight, eps)
            results.append(result if result.is_cuda else result.clone())  # leaves share a buffer on a CPU
        return torch.cat(results, 1, out=out)


def by_leaves_of_inputs(leaves: Sequence[tuple[int, Product]]) -> Product:
    """Map x to all leaves' results side by side in float32, [num_tokens, len(leaves) * out].

    A leaf has a number of inputs, x's next columns, and its product."""
    sizes, products = [size for size, _ in leaves], [product for _, product in leaves]
    return lambda x: torch.cat(
        [product(part.contiguous()).float() for product, part in zip(products, x.split(sizes, 1), strict=True)], 1
    )


def sum_of_leaves(results: torch.Tensor, num_leaves: int) -> torch.Tensor:
    """The sum over leaves that lie side by side."""
    return sum_partials_torch(results.chunk(num_leaves, 1), tree=True)
