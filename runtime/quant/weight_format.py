"""Weight formats: how the weight of a linear map is stored in a checkpoint, held on a device, multiplied with.

From this are derived the checks at loading, the memory plan, random weights and what `callboard inspect` tells."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from runtime.kernels.experts.moe_w16a16 import ExpertLayer
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.numerics import Numerics
from runtime.kernels.table import Kernels
from runtime.spec.decoder_spec import ExpertsSpec
from runtime.spec.sharding import Part

Shape = tuple[int, ...]
Weight = tuple[torch.Tensor, ...]  # one weight's tensors on the device, in an order that its format chooses


class TensorSource(Protocol):
    """A checkpoint, as formats read it (runtime.loading.checkpoint.Checkpoint)."""

    def names(self) -> Sequence[str]: ...
    def __contains__(self, name: str) -> bool: ...
    def shape(self, name: str) -> Shape: ...
    def type_name(self, name: str) -> str: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def tensor(self, name: str, dtype: torch.dtype, device: torch.device, part: Part | None = None) -> torch.Tensor: ...
    def blocks(
        self, name: str, num_bytes: int, device: torch.device, part: Part | None = None
    ) -> torch.Tensor: ...  # of a GGUF tensor


class Location(NamedTuple):
    """Where a checkpoint has a parameter, and what of it is wanted."""

    name: str  # the checkpoint's, from which a format makes the names of its tensors
    shape: Shape  # of the whole parameter; (out, in) for the weight of a linear map
    transposed: bool = False  # the checkpoint has it as (in, out)
    parts: tuple[Part, ...] = ()  # the ranges to read, of one dimension; () is the whole


class StoredTensor(NamedTuple):
    """A tensor of a weight in a checkpoint."""

    shape: Shape | None  # None: any
    dtypes: tuple[torch.dtype, ...]  # in one of which it is stored
    optional: bool = False
    others: tuple[Shape, ...] = ()  # shapes that the same numbers may have


class WeightFormat(ABC):
    """How weights [out, in] of linear maps are stored, held and multiplied with."""

    name: str  # as `callboard inspect` and error messages have it

    @abstractmethod
    def stored(self, location: Location) -> dict[str, StoredTensor]:
        """The tensors of a weight in a checkpoint by name, the whole weight whatever the parts."""

    @abstractmethod
    def device_bytes(self, shape: Shape, numerics: Numerics) -> int:
        """The bytes of a weight of that shape on the device once it is read."""

    @abstractmethod
    def read(self, source: TensorSource, location: Location, numerics: Numerics) -> Weight:
        """The parts of a weight that the location names, on the device; `stored` tensors have been checked."""

    @abstractmethod
    def encode(self, dense: torch.Tensor, parts: tuple[Part, ...] = ()) -> Weight:
        """The weight that `read` would give for a checkpoint with these numbers, as near as the format gets; or the
        parts of it that a rank holds."""

    def join(self, weights: Sequence[Weight], row_order: torch.Tensor | None = None) -> Weight:
        """Several maps' weights as that of one map with the rows of all; then its first rows in another order.

        This one serves formats that have a row of each tensor for a row of the weight; it may change the tensors."""
        joined = tuple(same[0] if len(same) == 1 else torch.cat(same) for same in zip(*weights, strict=True))
        if row_order is not None:
            for tensor in joined:
                tensor[: len(row_order)] = tensor[row_order]
        return joined

    @abstractmethod
    def linear(self, weight: Weight, bias: torch.Tensor | None, kernels: Kernels) -> Linear:
        """The product with a weight and what surrounds it in a decoder."""

    @abstractmethod
    def experts(
        self, spec: ExpertsSpec, router: Linear, weights: Iterable[tuple[Weight, Weight]], kernels: Kernels
    ) -> ExpertLayer:
        """A mixture from each expert's gate_up and down."""


_FLOATS = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2
)  # fmt: skip


class DenseFormat(WeightFormat):
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


DENSE = DenseFormat()
