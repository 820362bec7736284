"""LinearMaps: makes a decoder's fused linear maps from its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from runtime.base.model.decoder_spec import AttentionSpec, DecoderSpec, ExpertsSpec
from runtime.base.model.mixer_spec import DeltaRuleSpec
from runtime.base.model.sharding import UNGROUPED, Part
from runtime.kernels.collectives.communicator import OneRank
from runtime.kernels.collectives.heads_norm import HeadsNorm, HeadsWeight
from runtime.kernels.cpu.linear.interleaved_weight import InterleavedWeight, dequantize_interleaved
from runtime.kernels.cpu.linear.weight_form import ROWS
from runtime.kernels.experts.moe_torch import ExpertBiases, ExpertLayer, Router, SharedBeside
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.table import Kernels
from runtime.models.weights import ReadWeight
from runtime.quant.quantized_formats import InterleavedFormat, fused_linear
from runtime.quant.weight_format import DENSE, Weight, WeightFormat

FormatOf = Callable[[str], WeightFormat]  # of a parameter by its name
# Each rank of a group has some inputs of these maps, so results are summed over ranks.
SUMS = ("out", "mix_out", "down", "dense_down")
_ROUTER_ROWS = 8  # a router with the row of the shared experts has a multiple, so that its logits are aligned
_AT_ONCE = 1 << 22  # numbers of an embedding that are read at once


class MapPart(NamedTuple):
    """Rows of a fused map: the weights of some of its parameters, joined in one format."""

    names: list[str]
    weight_format: WeightFormat
    weight: Weight


class Embedding(NamedTuple):
    """A token embedding."""

    table: torch.Tensor | InterleavedWeight  # [own tokens, hidden]
    lookup: Callable[[torch.Tensor, float], torch.Tensor]  # token ids, a factor -> [num_tokens, hidden]


class LinearMaps:
    """The maps of a whole model. `rank_maps.py` extends this class for the ranks of a group.

    Parameters are read in a fixed order, on which the weights that `draw` makes depend."""

    def __init__(self, spec: DecoderSpec, kernels: Kernels, format_of: FormatOf, read: ReadWeight) -> None:
        self.spec, self.kernels, self.format_of, self.read = spec, kernels, format_of, read

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

    def columns(self, parts: list[MapPart], bias: torch.Tensor | None) -> Linear:
        """The map with these rows. Each rank of a group has some of its outputs."""
        return fused_linear([(part.weight_format, part.weight) for part in parts], bias, self.kernels)

    def experts(self, prefix: str, spec: ExpertsSpec) -> ExpertLayer:
        """The mixture of experts of a layer."""
        prefixes = self._expert_prefixes(prefix, spec)
        if self.kernels.compiled is not None:
            router = self._router(prefix, spec)
            layers = [(self._own(p, "gate_up"), self._own(p, "down")) for p in prefixes]
            return self.kernels.compiled.experts(spec, router, layers)
        own, of_shared = (self.format_of(f"{prefixes[e]}down.weight") for e in (0, -1))
        is_one = own.stacks_with(of_shared)
        routed = spec if is_one else replace(spec, shared=0, shared_gate=False)
        router = self._router(prefix, routed)
        biases = list[tuple[torch.Tensor | None, ...]]()
        weights = (self._expert(p, biases) for p in prefixes[: routed.all_experts])
        mixture = own.experts(routed, router, weights, self.kernels)
        mixture.biases = ExpertBiases(*map(_stacked, zip(*biases, strict=True)))
        if is_one:
            return mixture
        gate = self.kernels.linear(self.read(f"{prefix}shared_gate.weight")[0], None) if spec.shared_gate else None
        shared = [(self._own(p, "gate_up").product, self._own(p, "down").product) for p in prefixes[spec.num_experts :]]
        return SharedBeside(mixture, gate, shared, router.logits.norm, self.kernels.activate)

    def stored(self, name: str) -> torch.Tensor | InterleavedWeight:
        """A weight as it is stored: interleaved or dense."""
        weight_format, weight = self.format_of(name), self.read(name)
        if isinstance(weight_format, InterleavedFormat):
            return weight_format.interleaved([weight], len(weight[0]))
        return weight[0]

    def heads_norm(self, prefix: str) -> HeadsNorm:
        """The norms over all heads of q and of k."""
        weights = [self.turned(name) for name in (f"{prefix}q_heads_norm", f"{prefix}k_heads_norm")]
        parts = [HeadsWeight(weight, [len(weight)]) for weight in weights]
        return HeadsNorm(parts, self.spec.norm_eps, self.kernels.norm_in_place, OneRank())

    def embedding(self, name: str = "embed") -> Embedding:
        """The embedding of this name, quantized if its format is interleaved."""
        weight_format = self.format_of(name)
        if not isinstance(weight_format, InterleavedFormat):
            (table,) = self.read(name)
            return Embedding(table, partial(self.kernels.lookup, table))
        interleaved = self._interleaved(name, weight_format)
        assert self.kernels.interleaved_lookup is not None
        return Embedding(interleaved, partial(self.kernels.interleaved_lookup, interleaved))

    def head(self, table: torch.Tensor | InterleavedWeight) -> Linear:
        """The output head; `table` is that of the embedding."""
        weight_format, is_tied = self.format_of("head"), self.spec.tied_head
        if isinstance(weight_format, InterleavedFormat):
            if is_tied and weight_format is not self.format_of("embed"):  # a copy in its own format
                table = dequantize_interleaved(table) if isinstance(table, InterleavedWeight) else table
            return self._interleaved_head(weight_format, table)
        if not is_tied:
            return self.columns([MapPart(["head"], weight_format, self.read("head"))], None)
        assert isinstance(table, torch.Tensor), "a tied head of another format has the embedding's numbers"
        return self.columns([MapPart(["head"], weight_format, weight_format.encode(table))], None)

    def _interleaved_head(self, weight_format: InterleavedFormat, table: torch.Tensor | InterleavedWeight) -> Linear:
        """The head: of the embedding if it is tied, as it is or encoded."""
        if not self.spec.tied_head:
            table = self._interleaved("head", weight_format)
        elif isinstance(table, torch.Tensor):
            pieces = (weight_format.encode(rows) for rows in table.split(self._rows_at_once("head")))
            table = weight_format.interleaved(pieces, len(table))
        assert isinstance(table, InterleavedWeight)
        assert self.kernels.interleaved_linear is not None
        return self.kernels.interleaved_linear([table], None)

    def _interleaved(self, name: str, weight_format: InterleavedFormat) -> InterleavedWeight:
        """The rank's rows of the embedding or the head, which are read in pieces."""
        rows, step = self.spec.token_ids, self._rows_at_once(name)
        starts = range(rows.start, rows.stop, step)
        pieces = (self.read(name, Part(0, start, min(start + step, rows.stop))) for start in starts)
        return weight_format.interleaved(pieces, len(rows))

    def _rows_at_once(self, name: str) -> int:
        columns = self.spec.hidden_size
        if name == "layer_embed":
            columns = self.spec.num_layers * self.spec.layer_embed_size
        return max(1, _AT_ONCE // (columns * ROWS)) * ROWS

    def turned(self, name: str) -> torch.Tensor:
        """The weight of a norm of q or k, in the order that `rope_table` needs."""
        (weight,) = self.read(name)
        attention = self.spec.layers[_layer_of(name)].mixer
        assert isinstance(attention, AttentionSpec)
        return weight.view(-1, attention.head_dim)[:, rope_permutation(attention)].flatten()

    def _sum(self, prefix: str, name: str) -> Linear:
        return self._own(prefix, name)

    def _own(self, prefix: str, name: str) -> Linear:
        """A map for the inputs of this rank, which is not summed over ranks."""
        return LinearMaps.columns(self, self._parts(prefix, name), self._bias(prefix, name))

    def _parts(self, prefix: str, name: str) -> list[MapPart]:
        """The weights of a fused map. Neighbours in one format are joined."""
        layer, at, parts = _layer_of(prefix), 0, list[MapPart]()
        order, groups = row_order(self.spec, layer, name), list[list[str]]()
        for part in self.spec.linears(layer)[name][0]:
            parameter = f"{prefix}{part}.weight"
            if groups and self._joins(groups[-1][0], parameter):
                groups[-1].append(parameter)
            else:
                groups.append([parameter])
        for names in groups:
            weights = [self.read(parameter) for parameter in names]
            num_rows = sum(len(weight[0]) for weight in weights)
            own = None if order is None or at >= len(order) else order[at : at + num_rows] - at
            weight_format, at = self.format_of(names[0]), at + num_rows
            parts.append(MapPart(list(_ungrouped(prefix, names)), weight_format, weight_format.join(weights, own)))
        return parts

    def _joins(self, name: str, other: str) -> bool:
        formats = self.format_of(name), self.format_of(other)
        interleaved = [each.encoding for each in formats if isinstance(each, InterleavedFormat)]
        return len(set(interleaved)) <= 1

    def _bias(self, prefix: str, name: str) -> torch.Tensor | None:
        layer = _layer_of(prefix)
        parts, has_bias = self.spec.linears(layer)[name]
        if not has_bias:
            return None
        biases = [self.read(f"{prefix}{part}.bias") for part in parts]
        return DENSE.join(biases, row_order(self.spec, layer, name))[0]

    def _router(self, prefix: str, spec: ExpertsSpec) -> Router:
        (weight,) = self.read(f"{prefix}router.weight")
        bias = self.read(f"{prefix}router.bias")[0] if spec.router_bias else None
        if spec.shared_gate:
            (gate,) = self.read(f"{prefix}shared_gate.weight")
            missing = -(len(weight) + 1) % _ROUTER_ROWS
            weight = torch.cat((weight, gate, gate.new_zeros(missing, gate.shape[1])))
            bias = None if bias is None else torch.cat((bias, bias.new_zeros(len(weight) - len(bias))))
        choice_bias = self.read(f"{prefix}choice_bias")[0].float() if spec.choice_bias else None
        norm = self.read(f"{prefix}router_norm")[0].float() * weight.shape[1] ** -0.5 if spec.own_norm else None
        scales = self.read(f"{prefix}expert_scales")[0].float() if spec.expert_scales else None
        return Router(self.kernels.linear(weight, bias), choice_bias, spec.float32_logits, norm, scales)

    def _expert(self, prefix: str, biases: list[tuple[torch.Tensor | None, ...]]) -> tuple[Weight, Weight]:
        """The gate_up and down of an expert. Their biases are appended to the list."""
        maps = [(self._parts(prefix, name)[0].weight, self._bias(prefix, name)) for name in ("gate_up", "down")]
        (gate_up, _), (down, _) = maps
        biases.append(tuple(bias for _, bias in maps))
        return gate_up, down

    def _expert_prefixes(self, prefix: str, spec: ExpertsSpec) -> list[str]:
        return [f"{prefix}experts.{e}." for e in range(spec.all_experts)]


def _stacked(biases: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """[num_experts, out]; None without biases."""
    found = [bias for bias in biases if bias is not None]
    return torch.stack(found) if found else None


def _layer_of(prefix: str) -> int:
    """The layer of a prefix such as layers.3. or layers.3.experts.0."""
    return int(prefix.split(".")[1])


def _ungrouped(prefix: str, names: Sequence[str]) -> Iterator[str]:
    """The weights in the rows of these weights after `row_order`."""
    for name in names:
        part = name.removeprefix(prefix).removesuffix(".weight")
        yield from (f"{prefix}{own}.weight" for own in UNGROUPED.get(part, (part,)))


def row_order(spec: DecoderSpec, layer: int, name: str) -> torch.Tensor | None:
    """The order of the first rows of a layer's fused map that the kernels need; None if it is that of the checkpoint.

    Heads of q and k are in the order of `rope_table`, and rows that the checkpoint groups by head in that of UNGROUPED.
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
