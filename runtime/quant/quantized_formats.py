"""The formats of quantized weights: dequantized as they are read, or quantized on the device."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from runtime.base.model.sharding import Part
from runtime.kernels.numerics import Numerics
from runtime.quant.checkpoint_layouts import CheckpointLayout, Plain
from runtime.quant.encodings import Encoding
from runtime.quant.weight_format import DenseFormat, Location, Shape, StoredTensor, Tensors, TensorSource, WeightFormat

_SMALL = 1 << 20  # numbers up to which one thread dequantizes a weight


@contextmanager
def threads_for(num_values: int) -> Iterator[None]:
    """Use one thread for a small weight, and all threads for a large one.

    Threads wait for one another after every tensor operation. On busy cores, thousands of these waits for small weights
    took ten times the work itself."""
    usual = torch.get_num_threads()
    if num_values > _SMALL or usual == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


class DequantizedFormat(DenseFormat):
    """Quantized in the checkpoint, dense on the device, so that every product takes the weight."""

    def __init__(self, layout: CheckpointLayout, encoding: Encoding) -> None:
        self._layout, self.encoding = layout, encoding
        self.name = encoding.name

    def stored(self, location: Location) -> dict[str, StoredTensor]:
        return self._layout.stored(location)

    def read(self, source: TensorSource, location: Location, numerics: Numerics) -> Tensors:
        parts = location.parts
        # A rank's columns belong to all groups, and a shared expert's part may begin within a block.
        if parts and (location.place is not None or (self.encoding.reordered and parts[0].dim == 1)):
            (whole,) = self.read(source, location._replace(parts=(), place=None), numerics)
            return (self.encode(whole, parts)[0].contiguous(),)
        with threads_for(math.prod(location.shape)):
            return (self.encoding.dequantize(self._layout.read(source, location, numerics.device), numerics.dtype),)

    def random(self, shape: Shape, generator: torch.Generator) -> Tensors | None:
        return self.encoding.random(shape, generator)

    def parts_of_random(self, weight: Tensors, parts: tuple[Part, ...], numerics: Numerics) -> Tensors:
        return self.encode(self.encoding.dequantize(weight, numerics.dtype), parts)


class QuantizedFormat(WeightFormat):
    """Quantized in the checkpoint and on the device. Each backend with products has a subclass."""

    mixes: ClassVar[bool] = False  # the weights of a fused layer may differ in encoding

    def __init__(
        self,
        layout: CheckpointLayout,
        encoding: Encoding,
        numerics: Numerics,
        is_expert: bool = False,
        by_row: bool = False,  # each row gets a copy of its block's scales, so that rows can be reordered
    ) -> None:
        self.layout, self.numerics, self._is_expert = layout, numerics, is_expert
        self._scale_rows = encoding.scale_rows if by_row else 1
        self.encoding = encoding.by_row if by_row else encoding
        self.name = self.encoding.name

    @staticmethod
    @abstractmethod
    def takes(encoding: Encoding) -> bool:
        """True if the backend has products for an encoding, where shapes fit (`fits`, `Encoding.fits`)."""

    @staticmethod
    @abstractmethod
    def fits(encoding: Encoding, shape: Shape) -> bool:
        """True if a weight of this shape can stay quantized, in an encoding that the backend takes."""

    @abstractmethod
    def packed(self, weight: Tensors) -> Tensors:
        """A weight of the encoding as the device holds it.

        Its tensors keep their rows for each block of rows, so that `HeldWeight` can join and split them."""

    def dequantizes(self, shape: Shape) -> bool:
        """True if a product with many rows dequantizes such a weight to a dense copy on a GPU."""
        return False

    def stored(self, location: Location) -> dict[str, StoredTensor]:
        return self.layout.stored(location)

    def read(self, source: TensorSource, location: Location, numerics: Numerics) -> Tensors:
        with threads_for(math.prod(location.shape)):
            values, *shared = self.layout.read(source, location, numerics.device)
            if self._scale_rows > 1:
                shared = [tensor.repeat_interleave(self._scale_rows, 0)[: len(values)] for tensor in shared]
            return self.packed((values, *shared))

    def encode(self, dense: torch.Tensor, parts: tuple[Part, ...] = ()) -> Tensors:
        if parts and parts[0].dim == 0 and self.encoding.scale_rows == 1:  # only these rows
            dense, parts = torch.cat([dense[part.start : part.stop] for part in parts]), ()
        return self.parts_of_random(self.encoding.encode(dense), parts, self.numerics)

    def random(self, shape: Shape, generator: torch.Generator) -> Tensors | None:
        return None if isinstance(self.layout, Plain) else self.encoding.random(shape, generator)

    def parts_of_random(self, weight: Tensors, parts: tuple[Part, ...], numerics: Numerics) -> Tensors:
        pieces = [self.encoding.part(weight, part) for part in parts]
        return self.packed(self.encoding.join(pieces) if pieces else weight)

    def joins(self, other: WeightFormat) -> bool:
        return isinstance(other, QuantizedFormat) and other.encoding.flat == self.encoding.flat
