"""LinearMaps: makes a decoder's fused linear maps from its parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch

from runtime.kernels.collectives.communicator import OneRank
from runtime.kernels.collectives.heads_norm import HeadsNorm, HeadsWeight
from runtime.kernels.experts.moe_torch import ExpertLayer
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.table import Kernels
from runtime.models.weights import ReadWeight
from runtime.quant.weight_format import DENSE, Weight, WeightFormat
from runtime.spec.decoder_spec import DecoderSpec, ExpertsSpec

FormatOf = Callable[[str], WeightFormat]  # of a parameter by its name
SUMS = ("out", "down")  # each rank of a group has some inputs of these maps, so results are summed over ranks


class LinearMaps:
    """The maps of a whole model. `rank_maps.py` extends this class for the ranks of a group.

    Parameters are read in a fixed order, on which the weights that `draw` makes depend."""

    def __init__(self, spec: DecoderSpec, kernels: Kernels, format_of: FormatOf, read: ReadWeight) -> None:
        self.spec, self.kernels, self.format_of, self.read = spec, kernels, format_of, read

    def linear(self, prefix: str, name: str) -> Linear:
        """A fused linear map of a layer."""
        if name in SUMS:
            return self._sum(prefix, name)
        weight_format, weight = self._weight(prefix, name)
        parts, bias = [f"{prefix}{part}" for part in self.spec.linears()[name][0]], self._bias(prefix, name)
        return self.columns([f"{part}.weight" for part in parts], weight_format, weight, bias)

    def columns(
        self, names: list[str], weight_format: WeightFormat, weight: Weight, bias: torch.Tensor | None
    ) -> Linear:
        """The map with the weights of these parameters. Each rank of a group has some of its outputs."""
        return weight_format.linear(weight, bias, self.kernels)

    def experts(self, prefix: str, spec: ExpertsSpec) -> ExpertLayer:
        """The mixture of experts of a layer."""
        router, prefixes = self._router(prefix), self._expert_prefixes(prefix, spec)
        weights = ((self._weight(p, "gate_up")[1], self._weight(p, "down")[1]) for p in prefixes)
        return self.format_of(f"{prefixes[0]}down.weight").experts(spec, router, weights, self.kernels)

    def heads_norm(self, prefix: str) -> HeadsNorm:
        """The norms over all heads of q and of k."""
        weights = [self.turned(name) for name in (f"{prefix}q_heads_norm", f"{prefix}k_heads_norm")]
        parts = [HeadsWeight(weight, [len(weight)]) for weight in weights]
        return HeadsNorm(parts, self.spec.norm_eps, self.kernels.norm_in_place, OneRank())

    def embedding(self, embed: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Token ids -> [num_tokens, hidden], if a rank has some rows of `embed`; None if it has all."""
        return None

    def turned(self, name: str) -> torch.Tensor:
        """The weight of a norm of q or k, in the order that `rope_table` needs."""
        return self.read(name)[0].view(-1, self.spec.head_dim)[:, rope_permutation(self.spec)].flatten()

    def _sum(self, prefix: str, name: str) -> Linear:
        weight_format, weight = self._weight(prefix, name)
        return weight_format.linear(weight, self._bias(prefix, name), self.kernels)

    def _weight(self, prefix: str, name: str) -> tuple[WeightFormat, Weight]:
        """The weight of a fused linear map, and its format."""
        names = [f"{prefix}{part}.weight" for part in self.spec.linears()[name][0]]
        weight_format = self.format_of(names[0])
        return weight_format, weight_format.join([self.read(name) for name in names], row_order(self.spec, name))

    def _bias(self, prefix: str, name: str) -> torch.Tensor | None:
        parts, has_bias = self.spec.linears()[name]
        if not has_bias:
            return None
        return DENSE.join([self.read(f"{prefix}{part}.bias") for part in parts], row_order(self.spec, name))[0]

    def _router(self, prefix: str) -> Linear:
        return self.kernels.linear(self.read(f"{prefix}router.weight")[0], None)

    def _expert_prefixes(self, prefix: str, spec: ExpertsSpec) -> list[str]:
        return [f"{prefix}experts.{e}." for e in range(spec.num_experts)]


def row_order(spec: DecoderSpec, name: str) -> torch.Tensor | None:
    """The order of the rows of q and k that `rope_table` needs; None if it is that of the checkpoint."""
    if name != "qkv" or not spec.rope.reorders_heads:
        return None
    heads = torch.arange(spec.num_heads + spec.num_kv_heads)
    return (heads[:, None] * spec.head_dim + rope_permutation(spec)).flatten()


def rope_permutation(spec: DecoderSpec) -> torch.Tensor:
    """[head_dim]: the order of a head's dimensions in which i is rotated with i + head_dim / 2 (see rope_table).

    Checkpoints that rotate only the first dimensions pair these among themselves, and some checkpoints pair neighbours.
    Attention scores do not change if q and k are reordered alike."""
    dims, rotary_dim = torch.arange(spec.head_dim), int(spec.head_dim * spec.rope.partial)
    turned, others = dims[:rotary_dim], dims[rotary_dim:]
    pairs = (turned[::2], turned[1::2]) if spec.rope.interleaved else turned.tensor_split(2)
    halves = zip(pairs, others.tensor_split(2), strict=True)
    return torch.cat([part for half in halves for part in half])
