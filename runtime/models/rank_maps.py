"""The linear maps of a rank in a tensor-parallel group: subclasses of LinearMaps.

`sharded` is the only place that chooses: a decoder and its layers do not depend on ranks or leaves.
"""

from __future__ import annotations

from typing import Any

import torch

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.base.model.sharding import leaves_of, ungrouped
from runtime.kernels.collectives.communicator import Communicator
from runtime.kernels.collectives.divided_linear import (
    ColumnLeaves,
    ExpertLeaves,
    ReducedExperts,
    ReducedLinear,
    by_leaves_of_inputs,
    sum_of_leaves,
)
from runtime.kernels.collectives.heads_norm import HeadsNorm, HeadsWeight
from runtime.kernels.experts.moe_torch import ExpertLayer, Experts
from runtime.kernels.linear.linear_torch import Linear, Product
from runtime.models.linear_maps import SUMS, Embedding, LinearMaps
from runtime.quant.held_weight import HeldWeight


def sharded(maps: LinearMaps, communicator: Communicator, rank_invariant: bool) -> LinearMaps:
    """The maps of the spec's rank. The communicator connects its group."""
    kind = LeafMaps if rank_invariant else RankMaps if communicator.size > 1 else None
    return maps if kind is None else kind(maps, communicator)


class RankMaps(LinearMaps):
    """Maps of one rank's share of the weights. The results of SUMS are summed over ranks."""

    def __init__(self, maps: LinearMaps, communicator: Communicator) -> None:
        super().__init__(maps.spec, maps.kernels, maps.format_of, maps.read)
        self.communicator = communicator

    def _sum(self, prefix: str, name: str) -> Linear:
        return ReducedLinear(super()._sum(prefix, name), self.communicator)

    def _bias(self, prefix: str, name: str) -> torch.Tensor | None:
        bias = super()._bias(prefix, name)
        return None if name in SUMS and self.spec.shard.rank else bias  # sums add the first rank's

    def experts(self, prefix: str, spec: ExpertsSpec) -> ExpertLayer:
        return ReducedExperts(super().experts(prefix, spec), self.communicator)

    def heads_norm(self, prefix: str) -> HeadsNorm:
        weights = []
        for name in (f"{prefix}q_heads_norm", f"{prefix}k_heads_norm"):
            weight = self.turned(name)
            weights.append(HeadsWeight(weight, self._lengths_of_sums(name, weight)))
        return HeadsNorm(weights, self.spec.norm_eps, None, self.communicator)

    def _lengths_of_sums(self, name: str, weight: torch.Tensor) -> list[int]:
        """The lengths of the pieces of a norm's sum."""
        return [len(weight)]

    def embedding(self, name: str = "embed") -> Embedding:
        own, communicator = super().embedding(name), self.communicator
        if communicator.size == 1:
            return own
        first, num_rows = self.spec.token_ids.start, own.table.shape[0]

        def embedded(token_ids: torch.Tensor, factor: float) -> torch.Tensor:
            places = token_ids - first
            elsewhere = (places < 0) | (places >= num_rows)
            rows = own.lookup(places.masked_fill_(elsewhere, 0), factor)
            return communicator.reduced(rows.masked_fill_(elsewhere[:, None], 0))

        return Embedding(own.table, embedded)


class LeafMaps(RankMaps):
    """Maps in leaves. Their bits do not depend on the number of ranks (EngineConfig.rank_invariant)."""

    def columns(self, parts: list[HeldWeight], bias: torch.Tensor | None) -> Linear:
        leaves = [leaf for part in parts for leaf in part.split(self._leaf_sizes(part))]
        own_biases = [] if bias is None else bias.split([leaf.num_rows for leaf in leaves])
        biases = [bias.clone() for bias in own_biases] or [None] * len(leaves)
        linears = zip(leaves, biases, strict=True)
        return ColumnLeaves([self.kernels.linear([leaf.operand], own) for leaf, own in linears])

    def _leaf_sizes(self, weight: HeldWeight) -> list[int]:
        """The rows of the weight's leaves, in the order that `row_order` gives it."""
        names = (name for parameter in weight.names for name in ungrouped(parameter))
        return [leaf.stop - leaf.start for name in names for leaf in leaves_of(self.spec, name)]

    def head(self, table: Any) -> Linear:
        weight_format, source = self.format_of("head"), self.format_of("embed")
        if not self.spec.tied_head:
            return self.columns([self.read("head")], None)
        is_same = weight_format.joins(source)
        tensors = weight_format.tensors(table) if is_same else weight_format.encode(source.dense(table))
        return self.columns([HeldWeight(("head",), weight_format, tensors)], None)

    def _sum(self, prefix: str, name: str) -> Linear:
        leaves = self._input_leaves(prefix, name)
        product = by_leaves_of_inputs(leaves)
        linear = Linear(lambda x: sum_of_leaves(product(x), len(leaves)), self.kernels.norm, self.kernels.activate)
        return ReducedLinear(linear, self.communicator)

    def experts(self, prefix: str, spec: ExpertsSpec) -> ExpertLayer:
        router, prefixes = self._router(prefix, spec), self._expert_prefixes(prefix, spec)
        products = [
            (self.linear(p, "gate_up").product, by_leaves_of_inputs(self._input_leaves(p, "down"))) for p in prefixes
        ]
        mixture = Experts(spec, router, products, lambda product: product, self.kernels.activate)
        num_leaves = len(leaves_of(self.spec, f"{prefixes[0]}down.weight"))
        return ExpertLeaves(mixture, num_leaves, self.communicator)

    def _lengths_of_sums(self, name: str, weight: torch.Tensor) -> list[int]:
        return [leaf.stop - leaf.start for leaf in leaves_of(self.spec, name)]

    def _input_leaves(self, prefix: str, name: str) -> list[tuple[int, Product]]:
        """The leaves of a map of some inputs, with the number of their inputs."""
        parameter = f"{prefix}{name}.weight"
        leaves = leaves_of(self.spec, parameter)
        weights = [self.read(parameter, leaf) for leaf in leaves]
        biases = [self._bias(prefix, name), *[None] * (len(leaves) - 1)]
        return [
            (leaf.stop - leaf.start, self.kernels.linear([weight.operand], bias).product)
            for leaf, weight, bias in zip(leaves, weights, biases, strict=True)
        ]
