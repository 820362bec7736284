"""A tower's parameters by name: found and checked in a checkpoint, or drawn at random."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Protocol

import torch

from runtime.base.model.tower_spec import TowerSpec
from runtime.base.types import CallboardError
from runtime.kernels.numerics import Numerics
from runtime.models.towers.names import LIMITS, short_names
from runtime.quant.weight_format import TensorSource

# Wrappers around towers, which versions of transformers name differently
_WRAPPERS = re.compile(r"^model\.|(?<=vision_tower\.)vision_model\.")


class ReadParameter(Protocol):
    """Reads a parameter in `TowerSpec.shapes()` in the compute dtype, on the device."""

    def __call__(self, parameter: str, /) -> torch.Tensor: ...

    def limits(self, name: str) -> tuple[float, ...]:
        """Return the limits of a map's input and output; empty without any."""


def tower_tensors(names: Iterable[str], spec: TowerSpec) -> dict[str, str]:
    """Return the tensor of each parameter, among a checkpoint's names. Missing ones have their short name."""
    stored = {_WRAPPERS.sub("", name): name for name in names}
    return {parameter: stored.get(name, name) for parameter, name in short_names(spec).items()}


class _FromSource:
    """Reads from a checkpoint."""

    def __init__(self, source: TensorSource, spec: TowerSpec, numerics: Numerics) -> None:
        self._source, self._spec, self._numerics = source, spec, numerics
        self._names, self._shapes = tower_tensors(source.names(), spec), spec.shapes()
        for parameter, name in self._names.items():
            if name not in source:
                raise CallboardError(f"The checkpoint lacks tensor {name} of its image encoder; use --images off.")
            if math.prod(shape := source.shape(name)) % math.prod(self._shapes[parameter]):
                wanted = list(self._shapes[parameter])
                raise CallboardError(f"Tensor {name} has shape {list(shape)}; the image encoder asks for {wanted}.")
            if not source.dtype(name).is_floating_point or source.dtype(name).itemsize < 2:
                raise CallboardError(
                    f"Tensor {name} is {source.type_name(name)}; image encoders need BF16, F16 or F32."
                )

    def __call__(self, parameter: str, /) -> torch.Tensor:
        name, shape = self._names[parameter], self._shapes[parameter]
        x = self._source.tensor(name, self._numerics.dtype, self._numerics.device)
        if parameter != "patch.weight":
            return x.reshape(shape)
        if x.ndim == 5:  # [out, 3, frames, side, side] over equal frames
            x = x.float().sum(2).to(x.dtype)
        if (name := f"{name}.1") in self._source:  # GGUF has each frame in a tensor
            x += self._source.tensor(name, self._numerics.dtype, self._numerics.device)
        side = self._spec.patch_size  # a linear map has the channels innermost
        return (x.view(-1, side, side, 3).permute(0, 3, 1, 2) if x.ndim == 2 else x).reshape(shape)

    def limits(self, name: str) -> tuple[float, ...]:
        if not self._spec.limits or name == "patch":
            return ()
        stem = self._names[f"{name}.weight"].removesuffix("linear.weight")
        if stem + LIMITS[0] not in self._source:
            return ()
        return tuple(float(self._source.tensor(stem + limit, torch.float32)) for limit in LIMITS)


def read_from(source: TensorSource, spec: TowerSpec, numerics: Numerics) -> ReadParameter:
    """Reads from a checkpoint, after a check of all tensors."""
    return _FromSource(source, spec, numerics)


class _Drawn:
    """Draws random weights in call order, scaled so that activations keep their size."""

    def __init__(self, spec: TowerSpec, numerics: Numerics, seed: int) -> None:
        self._shapes, self._numerics = spec.shapes(), numerics
        self._generator = torch.Generator(numerics.device).manual_seed(seed)

    def __call__(self, parameter: str, /) -> torch.Tensor:
        shape = self._shapes[parameter]
        noise = torch.randn(shape, generator=self._generator, device=self._numerics.device)
        is_factor = "norm" in parameter and parameter.endswith("weight")
        noise = noise.mul_(0.1).add_(1.0) if is_factor else noise.mul_(shape[-1] ** -0.5)
        return noise.to(self._numerics.dtype)

    def limits(self, name: str) -> tuple[float, ...]:
        return ()


def draw(spec: TowerSpec, numerics: Numerics, seed: int) -> ReadParameter:
    """Draws random weights from a seed."""
    return _Drawn(spec, numerics, seed)
