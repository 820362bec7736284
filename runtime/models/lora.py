"""DecoderAdapters: room for adapters (LoRA) on each fused linear map, and the map for each module in a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.sharding import parts_of
from runtime.base.types import CallboardError
from runtime.kernels.experts.dense_beside import DenseBeside
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.linear.lora import Adapters, AddAdapters, RowAdapters, make_adapters
from runtime.kernels.linear.small_results import EMPTY_WORD
from runtime.kernels.numerics import Numerics
from runtime.models.decoder import Layer, Mlp
from runtime.models.linear_maps import row_order
from runtime.models.weight_map import WeightMap, short_name

AdaptersOfMaps = dict[str, Adapters]  # key: the fused name of a layer's linear map


class DecoderAdapters(NamedTuple):
    """The adapters of all layers."""

    layers: list[AdaptersOfMaps]
    results: torch.Tensor  # all maps' results
    add: AddAdapters

    def adapted(self, layers: Sequence[Layer], rows: torch.Tensor) -> list[Layer]:
        """The layers for a step. `rows` [num_tokens] has the adapter index of each token."""
        if len(rows) == 1:
            self.results.fill_(EMPTY_WORD)  # one-row kernels wait for words that are not empty
        return [self._adapted_layer(layer, of, rows) for layer, of in zip(layers, self.layers, strict=True)]

    def _adapted_layer(self, layer: Layer, of: AdaptersOfMaps, rows: torch.Tensor) -> Layer:
        def adapted(linear: Linear, name: str) -> Linear:
            return linear.with_adapters(RowAdapters(rows, of[name], self.add))

        ffn = layer.feed_forward
        if isinstance(ffn, Mlp):
            ffn = Mlp(adapted(ffn.gate_up, "gate_up"), adapted(ffn.down, "down"))
        elif isinstance(ffn, DenseBeside):
            ffn = ffn.with_linears(adapted)
        own_input = None if layer.input is None else layer.input.with_linears(adapted)
        return replace(layer, mixer=layer.mixer.with_linears(adapted), feed_forward=ffn, input=own_input)


Matrices = tuple[torch.Tensor, torch.Tensor]  # A [rank, in] and B [out, rank], scaled


class MapPart(NamedTuple):
    """A part of a fused linear map."""

    layer: int
    name: str
    part: str


def make_decoder_adapters(
    spec: DecoderSpec, numerics: Numerics, add: AddAdapters, max_loras: int, max_rank: int
) -> DecoderAdapters:
    """Room for adapters in every layer of a rank's share; all are zeros."""
    layers = [
        {
            name: make_adapters(
                [size_out for size_out, _ in parts.values()], next(iter(parts.values()))[1], max_loras, max_rank,
                numerics.dtype, numerics.device,
            )
            for name, parts in spec.adapted_linears(layer).items()
        }
        for layer in range(spec.num_layers)
    ]  # fmt: skip
    map_results = [one.results for layer in layers for one in layer.values()]
    results = torch.cat(map_results)
    views = iter(results.split([len(own) for own in map_results]))
    return DecoderAdapters(
        [{name: one._replace(results=next(views)) for name, one in layer.items()} for layer in layers], results, add
    )


def map_parts_of(spec: DecoderSpec, weight_map: WeightMap) -> dict[str, MapPart]:
    """The modules that may have adapters, by their `short_name`."""
    return {
        short_name(weight_map.name_of(spec, f"layers.{layer}.{part}")): MapPart(layer, name, part)
        for layer in range(spec.num_layers)
        for name, parts in spec.adapted_linears(layer).items()
        for part in parts
    }


def write_adapter(
    layers: list[AdaptersOfMaps], spec: DecoderSpec, index: int, matrices: Mapping[MapPart, Callable[[], Matrices]],
) -> None:  # fmt: skip
    """Write a rank's share of the whole model's matrices as adapter `index`. Each is read when it is needed."""
    for layer, maps in enumerate(layers):
        for name, parts in spec.adapted_linears(layer).items():
            read = [matrices.get(MapPart(layer, name, part)) for part in parts]
            own = [
                None if one is None else of_rank(spec, f"layers.{layer}.{part}.weight", *one())
                for part, one in zip(parts, read, strict=True)
            ]
            maps[name].write(index, own, row_order(spec, layer, name))


def of_rank(spec: DecoderSpec, parameter: str, a: torch.Tensor, b: torch.Tensor) -> Matrices:
    """A rank's share of A and B. A rank with some outputs has their rows in B; a rank with some inputs
    has their columns in A."""
    own = parts_of(spec, parameter)
    if not own:
        return a, b
    if own[0].dim == 0:
        return a, torch.cat([b[one.start : one.stop] for one in own])
    return torch.cat([a[:, one.start : one.stop] for one in own], 1), b


def check_map_part(place: MapPart | None, module: str, shape: tuple[int, int], spec: DecoderSpec) -> MapPart:
    """Raises CallboardError if the model lacks this linear map, or it has another shape (out, in)."""
    if place is None:
        raise CallboardError(
            f"The adapter has matrices for {module}, but this model's layers have no linear map for adapters there."
        )
    wanted = spec.whole.adapted_linears(place.layer)[place.name][place.part]
    if shape != wanted:
        raise CallboardError(
            f"The adapter's matrices for {module} are for {shape[1]} inputs and {shape[0]} outputs, and this model's "
            f"map has {wanted[1]} and {wanted[0]}: the adapter belongs to another model."
        )
    return place
