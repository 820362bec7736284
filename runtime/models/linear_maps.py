"""LinearMaps: makes a decoder's fused linear maps from its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from runtime.base.model.decoder_spec import AttentionSpec, DecoderSpec, ExpertsSpec
from runtime.base.model.mixer_spec import DeltaRuleSpec
from runtime.base.model.sharding import Part
from runtime.kernels.collectives.communicator import OneRank
from runtime.kernels.collectives.heads_norm import HeadsNorm, HeadsWeight
from runtime.kernels.experts.moe_torch import ExpertLayer, Router, SharedBeside
from runtime.kernels.linear.linear_torch import Linear, Operands
from runtime.kernels.operations import LOOKUP, NORM_IN_PLACE
from runtime.kernels.table import Kernels
from runtime.models.weights import ReadWeight
from runtime.quant.held_weight import HeldWeight, joined
from runtime.quant.weight_format import WeightFormat

FormatOf = Callable[[str], WeightFormat]  # argument: the parameter name
# Each rank in a group has some inputs for these maps, so results are summed over ranks.
SUMS = ("out", "mix_out", "down", "dense_down")
_ROUTER_ROWS = 8  # a router with the row of the shared experts has a multiple, so that its logits are aligned
_AT_ONCE = 1 << 22  # numbers of an embedding that are read at once


class Embedding(NamedTuple):
    """A token embedding."""

    table: Any  # [own tokens, hidden], as kernels have it
    lookup: Callable[[torch.Tensor, float], torch.Tensor]  # token ids, a factor -> [num_tokens, hidden]


class LinearMaps:
    """The maps of a whole model. `rank_maps.py` extends this class for the ranks of a group.

    Parameters are read in a fixed order, on which the weights that `draw` makes depend."""

    def __init__(self, spec: DecoderSpec, kernels: Kernels, format_of: FormatOf, read: ReadWeight) -> None:
        self.spec, self.kernels, self.format_of, self.read = spec, kernels, format_of, read

    def dense(self, name: str) -> torch.Tensor:
        """A parameter without a linear layer: a norm, a bias, a table."""
        return self.read(name).dense

    def linear(self, prefix: str, name: str) -> Linear:
        """A fused linear map of a layer."""
        if name in SUMS:
            return self._sum(prefix, name)
        return self.columns(self._parts(prefix, name), self._bias(prefix, name))

    def optional(self, prefix: str, name: str) -> Linear | None:
        """A fused linear map, or None if the layer lacks it."""
        return self.linear(prefix, name) if name in self.spec.linears(_layer_of(prefix)) else None

    def whole(self, prefix: str, name: str) -> Linear:
        """A map without a bias that every rank has as a whole."""
        return LinearMaps.columns(self, self._parts(prefix, name), None)

    def columns(self, parts: list[HeldWeight], bias: torch.Tensor | None) -> Linear:
        """The map with these rows. Each rank in a group has some outputs."""
        return self.kernels.linear([part.operand for part in parts], bias)

    def experts(self, prefix: str, spec: ExpertsSpec) -> ExpertLayer:
        """A layer's mixture of experts."""
        prefixes = self._expert_prefixes(prefix, spec)
        own, shared_format = (self.format_of(f"{prefixes[e]}down.weight") for e in (0, -1))
        is_one = self.kernels.mixes_experts or own.joins(shared_format)
        routed = spec if is_one else replace(spec, shared=0, shared_gate=False)
        router = self._router(prefix, routed)
        experts = ((self._operands(p, "gate_up"), self._operands(p, "down")) for p in prefixes[: routed.all_experts])
        mixture = self.kernels.experts(routed, router, experts)
        if is_one:
            return mixture
        gate = self.kernels.linear([self.dense(f"{prefix}shared_gate.weight")], None) if spec.shared_gate else None
        shared = [(self._own(p, "gate_up").product, self._own(p, "down").product) for p in prefixes[spec.num_experts :]]
        return SharedBeside(mixture, gate, shared, router.logits.norm, self.kernels.activate)

    def heads_norm(self, prefix: str) -> HeadsNorm:
        """The norms over all heads, for q and k."""
        weights = [self.turned(name) for name in (f"{prefix}q_heads_norm", f"{prefix}k_heads_norm")]
        parts = [HeadsWeight(weight, [len(weight)]) for weight in weights]
        return HeadsNorm(parts, self.spec.norm_eps, self.kernels[NORM_IN_PLACE], OneRank())

    def embedding(self, name: str = "embed") -> Embedding:
        """The embedding of this name."""
        table = self._table(name)
        return Embedding(table, partial(self.kernels[LOOKUP], table))

    def head(self, table: Any) -> Linear:
        """The output head. A tied head reuses the embedding's table, in its own format."""
        weight_format, source = self.format_of("head"), self.format_of("embed")
        if not self.spec.tied_head:
            table = self._table("head")
        elif not weight_format.joins(source):
            dense = source.dense(table)
            pieces = map(weight_format.encode, dense.split(self._rows_at_once("head") or len(dense)))
            table = weight_format.operand(pieces, len(dense))
        return self.kernels.linear([table], None)

    def _table(self, name: str) -> Any:
        """The rank's rows of the embedding or the head for kernels, which are read in pieces if their format may."""
        rows, step = self.spec.token_ids, self._rows_at_once(name)
        if not step:
            return self.read(name).operand
        starts = range(rows.start, rows.stop, step)
        pieces = (self.read(name, Part(0, start, min(start + step, rows.stop))).tensors for start in starts)
        return self.format_of(name).operand(pieces, len(rows))

    def _rows_at_once(self, name: str) -> int:
        """Rows of a piece; 0 if the format has whole tables."""
        columns, multiple = self.spec.hidden_size, self.format_of(name).table_rows
        if name == "layer_embed":
            columns = self.spec.num_layers * self.spec.layer_embed_size
        return max(1, _AT_ONCE // (columns * multiple)) * multiple if multiple else 0

    def turned(self, name: str) -> torch.Tensor:
        """The norm weight for q or k, in the order that `rope_table` needs."""
        weight = self.dense(name)
        attention = self.spec.layers[_layer_of(name)].mixer
        assert isinstance(attention, AttentionSpec)
        return weight.view(-1, attention.head_dim)[:, rope_permutation(attention)].flatten()

    def _sum(self, prefix: str, name: str) -> Linear:
        return self._own(prefix, name)

    def _own(self, prefix: str, name: str) -> Linear:
        """A map for the inputs of this rank, which is not summed over ranks."""
        return self.kernels.linear(*self._operands(prefix, name))

    def _operands(self, prefix: str, name: str) -> Operands:
        return Operands([part.operand for part in self._parts(prefix, name)], self._bias(prefix, name))

    def _parts(self, prefix: str, name: str) -> list[HeldWeight]:
        """The weights of a fused map. Neighbours in one format are joined."""
        layer = _layer_of(prefix)
        weights = [self.read(f"{prefix}{part}.weight") for part in self.spec.linears(layer)[name][0]]
        return joined(weights, row_order(self.spec, layer, name))

    def _bias(self, prefix: str, name: str) -> torch.Tensor | None:
        layer = _layer_of(prefix)
        parts, has_bias = self.spec.linears(layer)[name]
        if not has_bias:
            return None
        biases = [self.read(f"{prefix}{part}.bias") for part in parts]
        return joined(biases, row_order(self.spec, layer, name))[0].dense

    def _router(self, prefix: str, spec: ExpertsSpec) -> Router:
        weight = self.dense(f"{prefix}router.weight")
        bias = self.dense(f"{prefix}router.bias") if spec.router_bias else None
        if spec.shared_gate:
            gate = self.dense(f"{prefix}shared_gate.weight")
            missing = -(len(weight) + 1) % _ROUTER_ROWS
            weight = torch.cat((weight, gate, gate.new_zeros(missing, gate.shape[1])))
            bias = None if bias is None else torch.cat((bias, bias.new_zeros(len(weight) - len(bias))))
        choice_bias = self.dense(f"{prefix}choice_bias").float() if spec.choice_bias else None
        norm = self.dense(f"{prefix}router_norm").float() * weight.shape[1] ** -0.5 if spec.own_norm else None
        scales = self.dense(f"{prefix}expert_scales").float() if spec.expert_scales else None
        return Router(self.kernels.linear([weight], bias), choice_bias, spec.float32_logits, norm, scales)

    def _expert_prefixes(self, prefix: str, spec: ExpertsSpec) -> list[str]:
        return [f"{prefix}experts.{e}." for e in range(spec.all_experts)]


def _layer_of(prefix: str) -> int:
    """The layer of a prefix such as layers.3. or layers.3.experts.0."""
    return int(prefix.split(".")[1])


def row_order(spec: DecoderSpec, layer: int, name: str) -> torch.Tensor | None:
    """The order that kernels need for the first rows in a layer's fused map; None if it is the checkpoint's.

    Heads of q and k follow `rope_table`, and rows that the checkpoint groups by head follow UNGROUPED.
    """
    mixer = spec.layers[layer].mixer
    if not mixer.reorders(name):
        return None
    if isinstance(mixer, DeltaRuleSpec):
        return _without_key_heads(mixer, spec.linears(layer)[name][0])
    assert isinstance(mixer, AttentionSpec)
    dim, turned = mixer.head_dim, rope_permutation(mixer)
    heads = torch.arange(mixer.num_heads + mixer.num_kv_heads)[:, None] * dim
    if not mixer.output_gate:
        return (heads + turned).flatten()
    pairs = torch.arange(mixer.num_heads)[:, None] * 2 * dim  # each head of q is followed by its gate
    gate, k = pairs + dim + torch.arange(dim), heads[mixer.num_heads :] + mixer.num_heads * dim + turned
    return torch.cat((gate, pairs + turned, k)).flatten()


def _without_key_heads(mixer: DeltaRuleSpec, parts: Mapping[str, tuple[int, ...]]) -> torch.Tensor:
    """The order for q, k, v, z, b and a. Each part has the rows of a key head together."""
    group = mixer.value_heads // mixer.key_heads
    sizes = {"mix_qkvz": [mixer.key_dim] * 2 + [group * mixer.value_dim] * 2, "mix_ba": [group] * 2}
    orders, at = list[torch.Tensor](), 0
    for part, (num_rows, _) in parts.items():
        rows = torch.arange(at, at + num_rows).view(mixer.key_heads, -1)
        orders += [own.flatten() for own in rows.split(sizes[part], 1)]
        at += num_rows
    return torch.cat(orders)


def rope_permutation(attention: AttentionSpec) -> torch.Tensor:
    """[head_dim]: the order of a head's dimensions in which i is rotated with i + head_dim / 2 (see rope_table).

    Checkpoints that rotate only the first dimensions pair these among themselves, and some checkpoints pair neighbours.
    Attention scores do not change if q and k are reordered alike."""
    rope, dims = attention.rope, torch.arange(attention.head_dim)
    if not rope.reorders_heads:
        return dims
    rotary_dim = int(attention.head_dim * rope.partial)
    turned, others = dims[:rotary_dim], dims[rotary_dim:]
    pairs = (turned[::2], turned[1::2]) if rope.interleaved else turned.tensor_split(2)
    halves = zip(pairs, others.tensor_split(2), strict=True)
    return torch.cat([part for half in halves for part in half])
