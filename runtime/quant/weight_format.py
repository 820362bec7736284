"""Tensors formats: how a linear layer's weight is stored in a checkpoint, held on a device, and multiplied.

The checks at loading, the memory plan, random weights and `callboard inspect` derive from them. This module has the
interface and its dense implementation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from runtime.base.model.sharding import Part
from runtime.base.types import CallboardError
from runtime.kernels.numerics import Numerics

Shape = tuple[int, ...]
Tensors = tuple[torch.Tensor, ...]  # a weight on the device: values, and scales or more as its format needs them


class TensorSource(ABC):
    """The tensors of a model under Hugging Face names: a checkpoint, perhaps with updates over it.

    Callers never write to a tensor."""

    @abstractmethod
    def names(self) -> Sequence[str]:
        """All tensors, sorted."""

    @abstractmethod
    def __contains__(self, name: str) -> bool:
        """True if there is a tensor of this name."""

    @abstractmethod
    def shape(self, name: str) -> Shape:
        """The shape of a tensor without reading it; a linear layer's is (out, in)."""

    @abstractmethod
    def type_name(self, name: str) -> str:
        """The type of a tensor in its file, such as BF16 or Q4_K."""

    @abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor's numbers before they are converted."""

    @abstractmethod
    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu", part: Part | None = None
    ) -> torch.Tensor:
        """Return a tensor, read, dequantized if needed, and converted. Of a part, only its bytes are read if possible.

        Raises CallboardError for an unknown name."""

    def blocks(
        self, name: str, num_bytes: int, device: torch.device | str = "cpu", part: Part | None = None
    ) -> torch.Tensor:
        """Return blocks of a quantized GGUF tensor, unchanged: uint8 [rows, blocks, bytes]."""
        raise CallboardError(f"Tensor {name} has no blocks; its config.json calls it one of a GGUF file.")

    def is_dense(self, name: str) -> bool:
        """True if there is a dense tensor in place of a quantized weight, which only updates bring."""
        return False


class SourceOver(TensorSource):
    """The tensors of another source; a subclass changes some."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source

    def names(self) -> Sequence[str]:
        return self.source.names()

    def __contains__(self, name: str) -> bool:
        return name in self.source

    def shape(self, name: str) -> Shape:
        return self.source.shape(name)

    def type_name(self, name: str) -> str:
        return self.source.type_name(name)

    def dtype(self, name: str) -> torch.dtype:
        return self.source.dtype(name)

    def is_dense(self, name: str) -> bool:
        return self.source.is_dense(name)

    def tensor(
        self, name: str, dtype: torch.dtype, device: torch.device | str = "cpu", part: Part | None = None
    ) -> torch.Tensor:
        return self.source.tensor(name, dtype, device, part)

    def blocks(
        self, name: str, num_bytes: int, device: torch.device | str = "cpu", part: Part | None = None
    ) -> torch.Tensor:
        return self.source.blocks(name, num_bytes, device, part)


class Location(NamedTuple):
    """Where a checkpoint has a parameter, and which parts of it to read."""

    name: str  # the checkpoint's; a format derives its tensors' names from it
    shape: Shape  # the whole tensor's; (out, in) for a linear weight
    transposed: bool = False  # the checkpoint has it as (in, out)
    parts: tuple[Part, ...] = ()  # ranges to read in one dimension; () for the whole
    place: Part | None = None  # the parameter's place in a tensor with several; None if it is the whole tensor

    def within(self, parts: tuple[Part, ...]) -> Location:
        """The location of these parts of the parameter; () for the whole parameter."""
        if (place := self.place) is None:
            return self._replace(parts=parts)
        moved = (Part(place.dim, place.start + part.start, place.start + part.stop) for part in parts)
        return self._replace(parts=tuple(moved) or (place,))


class StoredTensor(NamedTuple):
    """A tensor of a weight in a checkpoint."""

    shape: Shape | None  # None if any shape is right
    dtypes: tuple[torch.dtype, ...]  # supported dtypes
    optional: bool = False
    others: tuple[Shape, ...] = ()  # other supported shapes for the same elements


class WeightFormat(ABC):
    """How weights [out, in] of linear layers are stored, held and multiplied."""

    name: str  # shown by `callboard inspect` and error messages
    table_rows: ClassVar[int] = 0  # rows of a block of an embedding; 0 if embeddings cannot have the format

    @abstractmethod
    def stored(self, location: Location) -> dict[str, StoredTensor]:
        """The checkpoint tensors of the whole weight, by name."""

    @abstractmethod
    def device_bytes(self, shape: Shape, numerics: Numerics) -> int:
        """The bytes on the device for a weight with this shape."""

    @abstractmethod
    def read(self, source: TensorSource, location: Location, numerics: Numerics) -> Tensors:
        """The parts of a weight that the location names, on the device. The caller has checked the `stored` tensors."""

    @abstractmethod
    def encode(self, dense: torch.Tensor, parts: tuple[Part, ...] = ()) -> Tensors:
        """The weight with these numbers, rounded to the format, or the parts of it that a rank holds."""

    def random(self, shape: Shape, generator: torch.Generator) -> Tensors | None:
        """A random weight for `parts_of_random`, drawn without a dense copy; None if only `encode` makes one.

        It is the same for every form in which devices hold a weight that is quantized in its files."""
        return None

    def parts_of_random(self, weight: Tensors, parts: tuple[Part, ...], numerics: Numerics) -> Tensors:
        """The parts of a weight that `random` drew."""
        raise NotImplementedError

    @abstractmethod
    def operand(self, pieces: Iterable[Tensors], num_rows: int) -> Any:
        """What kernels multiply with, from consecutive pieces of its rows. Formats without `table_rows` take one."""

    def tensors(self, operand: Any) -> Tensors:
        """The inverse of `operand`, for embeddings."""
        raise NotImplementedError

    def dense(self, operand: Any) -> torch.Tensor:
        """The numbers [rows, columns] of an embedding."""
        raise NotImplementedError

    @abstractmethod
    def joins(self, other: WeightFormat) -> bool:
        """True if one weight can have rows in both formats, or one mixture experts."""


_FLOATS = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2
)  # fmt: skip


class DenseFormat(WeightFormat):
    """One tensor of any floating-point dtype in the checkpoint, converted to the compute dtype as it is read.

    Norms, biases and embeddings use this format, too."""

    name = "dense"

    def stored(self, location: Location) -> dict[str, StoredTensor]:
        shape = location.shape[::-1] if location.transposed else location.shape
        return {location.name: StoredTensor(shape, _FLOATS)}

    def device_bytes(self, shape: Shape, numerics: Numerics) -> int:
        # In deterministic mode, a CPU without packed products multiplies in float32 (linear_torch.py).
        in_float32 = numerics.deterministic and not numerics.packed and numerics.device.type == "cpu"
        return math.prod(shape) * (4 if in_float32 else numerics.dtype.itemsize)

    def read(self, source: TensorSource, location: Location, numerics: Numerics) -> Tensors:
        return (read_plain(source, location, numerics.dtype, numerics.device),)

    def encode(self, dense: torch.Tensor, parts: tuple[Part, ...] = ()) -> Tensors:
        pieces = [dense.narrow(part.dim, part.start, part.stop - part.start) for part in parts]
        return (torch.cat(pieces, parts[0].dim) if pieces else dense,)

    def operand(self, pieces: Iterable[Tensors], num_rows: int) -> Any:
        ((weight,),) = pieces
        return weight

    def tensors(self, operand: Any) -> Tensors:
        return (operand,)

    def dense(self, operand: Any) -> torch.Tensor:
        weight: torch.Tensor = operand
        return weight

    def joins(self, other: WeightFormat) -> bool:
        return isinstance(other, DenseFormat)


def read_plain(source: TensorSource, location: Location, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The parts of a dense tensor that the location names; [out, in] for a weight."""
    name = location.name
    if not location.parts:
        tensor = source.tensor(name, dtype, device)
    else:
        dim = location.parts[0].dim ^ location.transposed
        tensor = torch.cat([source.tensor(name, dtype, device, p._replace(dim=dim)) for p in location.parts], dim)
    return tensor.t().contiguous() if location.transposed else tensor


DENSE = DenseFormat()
