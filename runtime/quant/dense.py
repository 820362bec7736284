"""Dense weights: one number of the compute dtype for each."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from runtime.kernels.experts.moe_w16a16 import ExpertLayer
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.numerics import Numerics
from runtime.kernels.table import Kernels
from runtime.quant.weight_format import Location, Shape, StoredTensor, TensorSource, Weight, WeightFormat
from runtime.spec.decoder_spec import ExpertsSpec
from runtime.spec.sharding import Part

_FLOATS = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2
)  # fmt: skip


class Dense(WeightFormat):
    """One tensor of any floating-point type in the checkpoint, converted to the compute dtype as it is read.

    Parameters that are no weight of a linear map (norms, biases, embeddings) are stored and read like this, too."""

    name = "dense"

    def stored(self, location: Location) -> dict[str, StoredTensor]:
        shape = location.shape[::-1] if location.transposed else location.shape
        return {location.name: StoredTensor(shape, _FLOATS)}

    def device_bytes(self, shape: Shape, numerics: Numerics) -> int:
        # A CPU product that cannot be packed multiplies in float32 in deterministic mode (linear_torch.py).
        in_float32 = numerics.deterministic and not numerics.packed and numerics.device.type == "cpu"
        return math.prod(shape) * (4 if in_float32 else numerics.dtype.itemsize)

    def read(self, source: TensorSource, location: Location, numerics: Numerics) -> Weight:
        return (read_plain(source, location, numerics.dtype, numerics.device),)

    def encode(self, dense: torch.Tensor, parts: tuple[Part, ...] = ()) -> Weight:
        pieces = [dense.narrow(part.dim, part.start, part.stop - part.start) for part in parts]
        return (torch.cat(pieces, parts[0].dim) if pieces else dense,)

    def linear(self, weight: Weight, bias: torch.Tensor | None, kernels: Kernels) -> Linear:
        return kernels.linear(weight[0], bias)

    def experts(
        self, spec: ExpertsSpec, router: Linear, weights: Iterable[tuple[Weight, Weight]], kernels: Kernels
    ) -> ExpertLayer:
        return kernels.experts(spec, router, ((gate_up[0], down[0]) for gate_up, down in weights))


def read_plain(source: TensorSource, location: Location, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The parts of a tensor of plain numbers that the location names, [out, in] if it is a weight."""
    name = location.name
    if not location.parts:
        tensor = source.tensor(name, dtype, device)
    else:
        dim = location.parts[0].dim ^ location.transposed
        tensor = torch.cat([source.tensor(name, dtype, device, p._replace(dim=dim)) for p in location.parts], dim)
    return tensor.t().contiguous() if location.transposed else tensor


DENSE = Dense()
