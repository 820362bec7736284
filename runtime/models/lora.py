"""Where a decoder's adapters (LoRA) are: room beside each fused linear map, and how a file's modules get there."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from runtime.kernels.linear.lora import Adapters, make_adapters, padded_rank
from runtime.kernels.linear.small_results import EMPTY_WORD
from runtime.kernels.numerics import Numerics
from runtime.models.weight_map import WeightMap
from runtime.spec.decoder_spec import DecoderSpec
from runtime.spec.sharding import parts_of
from runtime.spec.types import CallboardError

_WRAPPERS = re.compile(r"^(?:(?:model|language_model|transformer)\.)+")
LayerAdapters = dict[str, Adapters]  # by the fused name of a layer's linear map


class DecoderAdapters(NamedTuple):
    """The adapters of all layers."""

    layers: list[LayerAdapters]
    results: torch.Tensor  # of all maps

    def clear_results(self) -> None:
        """What comes before the first layer of a step of one row."""
        self.results.fill_(EMPTY_WORD)


Matrices = tuple[torch.Tensor, torch.Tensor]  # A [rank, in] and B [out, rank], scaled


class Place(NamedTuple):
    """A part of a fused linear map."""

    layer: int
    name: str
    part: str


def adapted_linears(spec: DecoderSpec) -> dict[str, dict[str, tuple[int, ...]]]:
    """The fused maps that may have adapters, with the (out, in) shapes of their parts: those of experts have none."""
    own = {name: parts for name, (parts, _) in spec.linears().items()}
    return {name: own[name] for name in ("qkv", "out")} if spec.experts is not None else own


def make_decoder_adapters(spec: DecoderSpec, numerics: Numerics, max_loras: int, max_rank: int) -> DecoderAdapters:
    """Room for adapters in every layer of what a rank has; all are zeros."""
    layers = [
        {
            name: make_adapters(
                [size_out for size_out, _ in parts.values()], next(iter(parts.values()))[1], max_loras, max_rank,
                numerics.dtype, numerics.device,
            )
            for name, parts in adapted_linears(spec).items()
        }
        for _ in range(spec.num_layers)
    ]  # fmt: skip
    of_maps = [one.results for layer in layers for one in layer.values()]
    results = torch.cat(of_maps)
    views = iter(results.split([len(own) for own in of_maps]))
    return DecoderAdapters(
        [{name: one._replace(results=next(views)) for name, one in layer.items()} for layer in layers], results
    )


def adapter_bytes(spec: DecoderSpec, numerics: Numerics, max_loras: int, max_rank: int, num_tokens: int) -> int:
    """Of that room, and of what a step of so many tokens makes of it."""
    if not max_loras:
        return 0
    rank, layer_size = padded_rank(max_rank), 0
    for parts in adapted_linears(spec).values():
        layer_size += sum(rank * (size_out + size_in) for size_out, size_in in parts.values())
    return max_loras * spec.num_layers * layer_size * numerics.dtype.itemsize + 3 * rank * num_tokens * 4


def places_of(spec: DecoderSpec, weight_map: WeightMap) -> dict[str, Place]:
    """The modules that may have adapters, by their `short_name`."""
    return {
        short_name(weight_map.names[part].format(layer, "")): Place(layer, name, part)
        for layer in range(spec.num_layers)
        for name, parts in adapted_linears(spec).items()
        for part in parts
    }


def short_name(module: str) -> str:
    """A module's name without the wrappers around the layers, which versions of transformers name differently."""
    return _WRAPPERS.sub("", module)


def write_adapter(
    layers: list[LayerAdapters], spec: DecoderSpec, index: int, matrices: Mapping[Place, Callable[[], Matrices]],
    row_order: torch.Tensor | None,
) -> None:  # fmt: skip
    """Make these matrices of the whole model adapter `index` of what a rank has. Each is read when it is needed.

    `row_order` is that of the rows of q and k where the decoder has another than the checkpoint."""
    for layer, maps in enumerate(layers):
        for name, parts in adapted_linears(spec).items():
            read = [matrices.get(Place(layer, name, part)) for part in parts]
            own = [
                None if one is None else of_rank(spec, f"layers.{layer}.{part}.weight", *one())
                for part, one in zip(parts, read, strict=True)
            ]
            maps[name].write(index, own, row_order if name == "qkv" else None)


def of_rank(spec: DecoderSpec, parameter: str, a: torch.Tensor, b: torch.Tensor) -> Matrices:
    """The parts of A and B that belong to a rank's part of their weight: where it has some outputs, these rows of B,
    and where it has some inputs, these columns of A."""
    own = parts_of(spec, parameter)
    if not own:
        return a, b
    if own[0].dim == 0:
        return a, torch.cat([b[one.start : one.stop] for one in own])
    return torch.cat([a[:, one.start : one.stop] for one in own], 1), b


def check_place(place: Place | None, module: str, shape: tuple[int, int], spec: DecoderSpec) -> Place:
    """Raises CallboardError if the model has no such linear map, or one of another shape (out, in)."""
    if place is None:
        raise CallboardError(
            f"The adapter has matrices for {module}, which is no linear map of this model's layers that can have them."
        )
    wanted = adapted_linears(spec.whole)[place.name][place.part]
    if shape != wanted:
        raise CallboardError(
            f"The adapter's matrices for {module} are for {shape[1]} inputs and {shape[0]} outputs, and this model's "
            f"map has {wanted[1]} and {wanted[0]}: the adapter belongs to another model."
        )
    return place
