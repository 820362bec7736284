"""The tensors that a model's published files have, to write files with random weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.head_spec import HeadSpec
from runtime.base.model.sharding import place_in_tensor
from runtime.kernels.numerics import Numerics
from runtime.models import load_spec
from runtime.models.heads.names import head_map
from runtime.models.towers.names import short_names
from runtime.models.towers.specs import tower_spec
from runtime.models.towers.tower_tensors import draw
from runtime.models.weight_map import WeightMap
from runtime.models.weights import random_parameter

Read = Callable[[str], torch.Tensor]  # a parameter by its name in the config's DecoderSpec
_BLOCK = 32  # mxfp4 elements that share an exponent
_LENGTH = 2.926  # root mean square of the e2m1 values
_BIAS = 127  # an exponent's bias


class FileTensor(NamedTuple):
    """A tensor of a file."""

    name: str
    nbytes: int
    make: Callable[[], torch.Tensor]


def file_tensors(config: dict[str, Any], read: Read, generator: torch.Generator | None) -> Iterator[FileTensor]:
    """The tensors of a model. Experts of gpt-oss are stacked, and in mxfp4 with its config; the generator draws their
    bytes."""
    spec, weight_map = load_spec(config)
    shapes, dtype, stacked = spec.shapes(), getattr(torch, config["torch_dtype"]), weight_map.experts_in_turn

    def whole(parameters: list[str]) -> torch.Tensor:
        place, parts = place_in_tensor(spec, parameters[0]), [read(parameter) for parameter in parameters]
        return parts[0] if place is None else torch.cat(parts, place.dim)

    for name, parameters in weight_map.tensors_of(spec).items():
        if not (stacked and ".experts." in parameters[0]):
            shape = len(parameters), *shapes[parameters[0]]
            yield _dense(name, shape, dtype, lambda own=parameters: whole(own))
    for layer in range(spec.num_layers if stacked else 0):
        yield from _stacked_experts(spec, weight_map, layer, dtype, read, generator)


def tower_files(config: dict[str, Any], generator: torch.Generator | None) -> Iterator[FileTensor]:
    """The tensors of a model's image encoder, drawn on the generator's device; none without an encoder."""
    if (spec := tower_spec(config)) is None:
        return
    dtype, shapes = getattr(torch, config["torch_dtype"]), spec.shapes()
    device = torch.device("cpu") if generator is None else generator.device
    read = draw(spec, Numerics(dtype=dtype, device=device, backend="torch", packed=False, deterministic=False), 0)
    for parameter, name in short_names(spec).items():
        yield _dense(name, shapes[parameter], dtype, lambda own=parameter: read(own))


def head_files(config: dict[str, Any], head: HeadSpec, generator: torch.Generator) -> Iterator[FileTensor]:
    """The tensors of a head in the model's checkpoint, drawn by the generator."""
    spec, weight_map = load_spec(config)
    names, shapes = head_map(weight_map, spec.num_layers), head.decoder.shapes()
    dtype = getattr(torch, config["torch_dtype"])

    def drawn(parameters: list[str]) -> torch.Tensor:
        place = place_in_tensor(head.decoder, parameters[0])
        parts = [random_parameter(parameter, shapes[parameter], generator) for parameter in parameters]
        return parts[0] if place is None else torch.cat(parts, place.dim)

    for name, parameters in names.tensors_of(head.decoder).items():
        shape = len(parameters), *shapes[parameters[0]]
        yield _dense(name, shape, dtype, lambda own=parameters: drawn(own))


def _stacked_experts(
    spec: DecoderSpec,
    weight_map: WeightMap,
    layer: int,
    dtype: torch.dtype,
    read: Read,
    generator: torch.Generator | None,
) -> Iterator[FileTensor]:
    """The tensors with all a layer's experts, as runtime/loading/stacked_experts.py reads them."""
    assert spec.experts is not None
    experts, hidden, ffn = range(spec.experts.num_experts), spec.hidden_size, spec.ffn.size
    prefix = weight_map.names["up"].format(layer, 0).partition(".experts.")[0] + ".experts."
    for stem, maps, rows, columns in (("gate_up", ("gate", "up"), 2 * ffn, hidden), ("down", ("down",), hidden, ffn)):

        def stacked(kind: str, maps: tuple[str, ...] = maps) -> torch.Tensor:
            expert_maps = ([read(f"layers.{layer}.experts.{e}.{name}.{kind}") for name in maps] for e in experts)
            return torch.stack([torch.stack(parts, 1).flatten(0, 1) for parts in expert_maps])  # rows in turn

        name, count = f"{prefix}{stem}_proj", len(experts)
        yield _dense(f"{name}_bias", (count, rows), dtype, lambda own=stacked: own("bias"))
        if f"layers.{layer}.experts.0.down.weight" not in (spec.quantization or {}):
            yield _dense(name, (count, columns, rows), dtype, lambda own=stacked: own("weight").transpose(1, 2))
            continue
        blocks = count, rows, columns // _BLOCK
        exponent = _BIAS - round(math.log2(_LENGTH * math.sqrt(columns)))
        yield _bytes(f"{name}_blocks", (*blocks, _BLOCK // 2), 0, 256, generator)
        yield _bytes(f"{name}_scales", blocks, exponent - 1, exponent + 1, generator)


def _dense(name: str, shape: tuple[int, ...], dtype: torch.dtype, make: Callable[[], torch.Tensor]) -> FileTensor:
    return FileTensor(name, math.prod(shape) * dtype.itemsize, lambda: make().to("cpu", dtype).contiguous())


def _bytes(name: str, shape: tuple[int, ...], low: int, high: int, generator: torch.Generator | None) -> FileTensor:
    """Random bytes, at least `low` and below `high`."""

    def make() -> torch.Tensor:
        device = "cpu" if generator is None else generator.device
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator, device=device).cpu()

    return FileTensor(name, math.prod(shape), make)
