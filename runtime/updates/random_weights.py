"""UndrawnTensors: a random-weight model's names and shapes, for updates that have all its tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.sharding import Part, stored_shape
from runtime.base.types import CallboardError
from runtime.models.weight_map import WeightMap
from runtime.quant.weight_format import Shape, TensorSource


class UndrawnTensors(TensorSource):
    """Tensors without numbers."""

    def __init__(self, spec: DecoderSpec, weight_map: WeightMap) -> None:
        names = weight_map.names_of(spec)
        shapes = {name: stored_shape(spec, name, shape) for name, shape in spec.shapes().items()}
        self._shapes = {
            name: shapes[parameter][::-1]
            if weight_map.transposed and parameter.endswith(".weight")
            else shapes[parameter]
            for parameter, name in names.items()
        }

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> Shape:
        return self._shapes[name]

    def type_name(self, name: str) -> str:
        return "BF16"

    def dtype(self, name: str) -> torch.dtype:
        return torch.bfloat16

    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu", part: Part | None = None
    ) -> torch.Tensor:
        raise CallboardError(f"The weights of this model are random; an update must have all tensors, also {name}.")
