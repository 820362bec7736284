"""The linear maps of a rank in a tensor-parallel group: subclasses of LinearMaps.

`sharded` is the only place that chooses: a decoder and its layers do not depend on ranks or leaves.
"""

from __future__ import annotations

import torch

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.base.model.sharding import leaves_of
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
from runtime.kernels.cpu.linear.interleaved_weight import InterleavedWeight, row_major
from runtime.kernels.experts.moe_torch import ExpertLayer, Experts
from runtime.kernels.linear.linear_torch import Linear, Product
from runtime.models.linear_maps import SUMS, Embedding, LinearMaps, MapPart
from runtime.quant.quantized_formats import InterleavedFormat
from runtime.quant.weight_format import Weight


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

    def columns(self, parts: list[MapPart], bias: torch.Tensor | None) -> Linear:
        sizes = [
            [leaf.stop - leaf.start for name in part.names for leaf in leaves_of(self.spec, name)] for part in parts
        ]
        biases = [None] * len(parts) if bias is None else bias.split([sum(own) for own in sizes])
        with_sizes = zip(parts, sizes, biases, strict=True)
        return ColumnLeaves([leaf for one in with_sizes for leaf in self._leaves_of_outputs(*one)])

    def _leaves_of_outputs(self, part: MapPart, sizes: list[int], bias: torch.Tensor | None) -> list[Linear]:
        def leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
            split = tensor.split([size * len(tensor) // sum(sizes) for size in sizes])
            return [leaf.clone() for leaf in split]  # aligned, because a library's sums may depend on alignment

        weights = zip(*map(leaves, part.weight), strict=True)
        biases = [None] * len(sizes) if bias is None else leaves(bias)
        pairs = zip(weights, biases, strict=True)
        return [part.weight_format.linear(leaf, own_bias, self.kernels) for leaf, own_bias in pairs]

    def _interleaved_head(self, weight_format: InterleavedFormat, table: torch.Tensor | InterleavedWeight) -> Linear:
        weight: Weight
        if not self.spec.tied_head:
            weight = self.read("head")
        elif isinstance(table, torch.Tensor):
            weight = weight_format.encode(table)
        else:
            weight = tuple(tensor for tensor in row_major(table)[1:] if tensor is not None)
        return self.columns([MapPart(["head"], weight_format, weight)], None)

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
        leaves, weight_format = leaves_of(self.spec, parameter), self.format_of(parameter)
        weights = [self.read(parameter, leaf) for leaf in leaves]
        biases = [self._bias(prefix, name), *[None] * (len(leaves) - 1)]
        return [
            (leaf.stop - leaf.start, weight_format.linear(weight, bias, self.kernels).product)
            for leaf, weight, bias in zip(leaves, weights, biases, strict=True)
        ]
