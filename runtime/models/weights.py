"""A decoder's parameters by name: found and checked in a checkpoint, read from it, or drawn at random."""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.sharding import Part, parts_of, place_in_tensor, stored_shape
from runtime.base.types import CallboardError
from runtime.kernels.numerics import Numerics
from runtime.models.checkpoint_model import unused_tensors
from runtime.models.weight_map import WeightMap
from runtime.quant.held_weight import HeldWeight
from runtime.quant.model_formats import weight_formats
from runtime.quant.weight_format import DENSE, Location, Tensors, TensorSource, WeightFormat


class ReadWeight(Protocol):
    """Reads the rank's part of a parameter in `spec.shapes()` by name, on the device; with `part`, that part of the
    whole parameter."""

    def __call__(self, parameter: str, part: Part | None = None, /) -> HeldWeight: ...


logger = logging.getLogger(__name__)
_REPORT_S = 10.0  # seconds between two reports on a load
_TRIMMED_AFTER = 1 << 28  # weight bytes
_MOST_DRAWN_ON_CPU = 1 << 28  # random weights
_IN_FLOAT32 = ("choice_bias", "expert_scales", "decay_log", "decay_bias", ".sinks")  # read in float32


def locate_parameters(spec: DecoderSpec, weight_map: WeightMap, source: TensorSource) -> dict[str, Location]:
    """Every parameter of the spec -> its location in the checkpoint, and the part that the spec's rank reads.

    Raises CallboardError for the first tensor that is missing, or has a wrong shape or type."""
    names = set(source.names())
    format_of, locations = weight_formats(spec.whole, None), {}
    shapes = spec.whole.shapes()
    for parameter, short_name in weight_map.names_of(spec).items():
        transposed = weight_map.transposed and parameter.endswith(".weight")
        whole = stored_shape(spec, parameter, shapes[parameter])
        location = Location(short_name, whole, transposed, place=place_in_tensor(spec, parameter))
        location = location.within(parts_of(spec, parameter))
        weight_format = format_of(parameter)
        tensors = weight_format.stored(location)
        if weight_map.base and not names.intersection(tensors):
            longer = location._replace(name=weight_map.base + short_name)
            if names.intersection(weight_format.stored(longer)):
                location, tensors = longer, weight_format.stored(longer)
        for name, (shape, dtypes, optional, others) in tensors.items():
            if name not in names:
                if optional:
                    continue
                raise CallboardError(
                    f"The checkpoint lacks tensor {name}; its config asks for shape {list(shape or ('any',))}."
                )
            if shape is not None and (found := tuple(source.shape(name))) != shape and found not in others:
                raise CallboardError(
                    f"Tensor {name} has shape {list(found)}; the checkpoint's config asks for {list(shape)}."
                )
            if source.dtype(name) not in dtypes:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
                raise CallboardError(
                    f"Tensor {name} is stored as {source.type_name(name)}, which {weight_format.name} weights are not "
                    f"({known}); convert it, or name its quantization in the checkpoint's config.json."
                )
        locations[parameter] = location
    return locations


def read_from(source: TensorSource, spec: DecoderSpec, weight_map: WeightMap, numerics: Numerics) -> ReadWeight:
    """Reads from a checkpoint, after a check of all tensors. Reports unused ones, on the first rank."""
    locations = locate_parameters(spec, weight_map, source)
    if spec.shard.rank == 0:
        unused_tensors(spec, weight_map, source, locations).log()
    return reader(source, locations, weight_formats(spec, numerics), weight_map, numerics)


class LoadProgress:
    """Reports a load's progress, with the seconds that are left.

    On a CPU it also returns freed memory to the system: glibc keeps holes between tensors that may add half the
    model's size."""

    def __init__(self, spec: DecoderSpec, numerics: Numerics) -> None:
        format_of, shapes = weight_formats(spec, numerics), spec.shapes()
        self._sizes = {name: format_of(name).device_bytes(shape, numerics) for name, shape in shapes.items()}
        self._total, self._done, self._untrimmed = sum(self._sizes.values()), 0, 0
        self._start = self._reported = time.perf_counter()
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if numerics.device.type == "cpu" else None

    def watched(self, read: ReadWeight) -> ReadWeight:
        """The same reader, with reports."""

        def reported(parameter: str, part: Part | None = None) -> HeldWeight:
            size = self._sizes.pop(parameter, 0)  # counted at its first part
            self._done += size
            self._untrimmed += size
            if self._trim is not None and self._untrimmed > _TRIMMED_AFTER:
                self._trim(0)
                self._untrimmed = 0
            if (now := time.perf_counter()) - self._reported > _REPORT_S:
                self._reported = now
                logger.info("%s", self._line(now - self._start))
            return read(parameter, part)

        return reported

    def finish(self) -> None:
        """Report the whole load."""
        if self._trim is not None:
            self._trim(0)
        seconds = time.perf_counter() - self._start
        logger.info("weights: %.2f GiB read in %.1f s", self._total / (1 << 30), seconds)

    def _line(self, seconds: float) -> str:
        left = seconds * (self._total - self._done) / max(self._done, 1)
        done, total = (size / (1 << 30) for size in (self._done, self._total))
        return f"weights: {done:.1f} of {total:.1f} GiB read in {seconds:.0f} s, about {left:.0f} s are left"


def reader(
    source: TensorSource,
    locations: Mapping[str, Location],
    format_of: Callable[[str], WeightFormat],
    weight_map: WeightMap,
    numerics: Numerics,
) -> ReadWeight:
    """Reads parameters from their locations, which are checked."""

    wide = replace(numerics, dtype=torch.float32)

    def read(parameter: str, part: Part | None = None) -> HeldWeight:
        location = locations[parameter]
        if part is not None:
            location = location.within((part,))
        weight_format = DENSE if source.is_dense(location.name) else format_of(parameter)
        adds_one = weight_map.adds_one(parameter)
        tensors = weight_format.read(source, location, wide if is_wide(weight_map, parameter) else numerics)
        return HeldWeight((parameter,), weight_format, (tensors[0] + 1.0,) if adds_one else tensors)

    return read


def is_wide(weight_map: WeightMap, parameter: str) -> bool:
    """Return True for a parameter that is float32 whatever the compute dtype: 1 + w has more digits than w."""
    return weight_map.adds_one(parameter) or parameter.endswith(_IN_FLOAT32)


def draw(spec: DecoderSpec, numerics: Numerics, seed: int) -> ReadWeight:
    """Draws random weights from a seed in call order, scaled so that activations keep their size. Ranks
    draw a whole parameter and keep their part, so that they have parts of one model.

    A CPU draws the same weights for every device. Large models are drawn on their device: a CPU needs minutes."""
    shapes, format_of = spec.whole.shapes(), weight_formats(spec, numerics)
    large = sum(math.prod(shape) for shape in shapes.values()) > _MOST_DRAWN_ON_CPU
    generator = torch.Generator(numerics.device if large else torch.device("cpu")).manual_seed(seed)

    drawn = dict[str, Callable[[tuple[Part, ...]], Tensors]]()  # a parameter's parts are read one after another

    def read(parameter: str, part: Part | None = None) -> HeldWeight:
        weight_format, parts = format_of(parameter), parts_of(spec, parameter) if part is None else (part,)
        if parameter not in drawn:
            drawn.clear()
            if (quantized := weight_format.random(shapes[parameter], generator)) is not None:
                on_device = tuple(tensor.to(numerics.device) for tensor in quantized)
                drawn[parameter] = partial(weight_format.parts_of_random, on_device, numerics=numerics)
            else:
                numbers = random_parameter(parameter, shapes[parameter], generator)
                drawn[parameter] = partial(weight_format.encode, numbers.to(numerics.device, numerics.dtype))
        return HeldWeight((parameter,), weight_format, drawn[parameter](parts))

    return read


def random_parameter(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A parameter of `spec.shapes()` in float32, drawn on the generator's device.

    Norms are near 1, states decay by about 3 % a token, and a sink weighs about as much as a position."""
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if name.endswith("decay_log"):
        return noise.sub_(3.0)
    if name.endswith(".sinks"):
        return noise
    is_factor = name.endswith(("norm", "factor", "expert_scales"))
    return noise.mul_(0.1).add_(1.0) if is_factor else noise.mul_(shape[-1] ** -0.5)
