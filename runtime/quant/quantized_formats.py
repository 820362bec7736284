"""The formats of quantized weights: dequantized as they are read, or quantized on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

from runtime.base.model.decoder_spec import ExpertsSpec
from runtime.base.model.sharding import Part
from runtime.kernels.cpu.linear.interleaved_weight import InterleavedWeight
from runtime.kernels.experts.moe_torch import Mixture, Router
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.numerics import Numerics
from runtime.kernels.table import Kernels
from runtime.quant.checkpoint_layouts import CheckpointLayout, Plain
from runtime.quant.encodings import Encoding
from runtime.quant.products import LlvmProducts, QuantizedProducts
from runtime.quant.weight_format import DenseFormat, Location, Shape, StoredTensor, TensorSource, Weight, WeightFormat

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

    def read(self, source: TensorSource, location: Location, numerics: Numerics) -> Weight:
        parts = location.parts
        # The columns of a rank belong to all groups, and the part of a shared expert may begin within a block.
        if parts and (location.place is not None or (self.encoding.reordered and parts[0].dim == 1)):
            (whole,) = self.read(source, location._replace(parts=(), place=None), numerics)
            return (self.encode(whole, parts)[0].contiguous(),)
        with threads_for(math.prod(location.shape)):
            return (self.encoding.dequantize(self._layout.read(source, location, numerics.device), numerics.dtype),)

    def random(self, shape: Shape, generator: torch.Generator) -> Weight | None:
        return self.encoding.random(shape, generator)

    def parts_of_random(self, weight: Weight, parts: tuple[Part, ...], numerics: Numerics) -> Weight:
        return self.encode(self.encoding.dequantize(weight, numerics.dtype), parts)


class QuantizedFormat(WeightFormat):
    """Quantized in the checkpoint and on the device."""

    def __init__(
        self, layout: CheckpointLayout, encoding: Encoding, products: QuantizedProducts, of_expert: bool = False
    ) -> None:
        self._layout, self.encoding, self._products = layout, encoding, products
        self._of_expert, self.name = of_expert, encoding.name

    def stored(self, location: Location) -> dict[str, StoredTensor]:
        return self._layout.stored(location)

    def device_bytes(self, shape: Shape, numerics: Numerics) -> int:
        of_weight = self._products.expert_bytes if self._of_expert else self._products.device_bytes
        return of_weight(self.encoding, shape)

    def dequantizes(self, shape: Shape) -> bool:
        """True if a product of many rows dequantizes a weight of this shape to a dense copy."""
        return self._products.dequantizes(self.encoding, shape)

    def read(self, source: TensorSource, location: Location, numerics: Numerics) -> Weight:
        return self._products.packed(self.encoding, self._layout.read(source, location, numerics.device))

    def encode(self, dense: torch.Tensor, parts: tuple[Part, ...] = ()) -> Weight:
        if parts and parts[0].dim == 0 and self.encoding.scale_rows == 1:  # only these rows
            dense, parts = torch.cat([dense[part.start : part.stop] for part in parts]), ()
        return self._parts(self.encoding.encode(dense), parts)

    def random(self, shape: Shape, generator: torch.Generator) -> Weight | None:
        return None if isinstance(self._layout, Plain) else self.encoding.random(shape, generator)

    def parts_of_random(self, weight: Weight, parts: tuple[Part, ...], numerics: Numerics) -> Weight:
        return self._parts(weight, parts)

    def _parts(self, whole: Weight, parts: tuple[Part, ...]) -> Weight:
        """The parts of an encoded weight, packed."""
        pieces = [self.encoding.part(whole, part) for part in parts]
        return self._products.packed(self.encoding, self.encoding.join(pieces) if pieces else whole)

    def linear(self, weight: Weight, bias: torch.Tensor | None, kernels: Kernels) -> Linear:
        return self._products.linear(self.encoding, weight, bias, kernels)

    def experts(
        self, spec: ExpertsSpec, router: Router, weights: Iterable[tuple[Weight, Weight]], kernels: Kernels
    ) -> Mixture:
        return self._products.experts(self.encoding, spec, router, weights, kernels)

    def stacks_with(self, other: WeightFormat) -> bool:
        return isinstance(other, QuantizedFormat) and other.encoding.flat == self.encoding.flat


class RowScalesFormat(QuantizedFormat):
    """Quantized, with the scales of blocks of rows repeated for each row, so that rows can be reordered."""

    def __init__(self, layout: CheckpointLayout, encoding: Encoding, products: QuantizedProducts) -> None:
        super().__init__(layout, encoding.by_row, products)
        self._scale_rows = encoding.scale_rows

    def read(self, source: TensorSource, location: Location, numerics: Numerics) -> Weight:
        values, *shared = self._layout.read(source, location, numerics.device)
        of_rows = (tensor.repeat_interleave(self._scale_rows, 0)[: len(values)] for tensor in shared)
        return self._products.packed(self.encoding, (values, *of_rows))


class InterleavedFormat(QuantizedFormat):
    """Quantized on a CPU, where the weights of one layer may differ in encoding."""

    def __init__(self, layout: CheckpointLayout, encoding: Encoding, products: LlvmProducts) -> None:
        super().__init__(layout, encoding, products)
        self._interleaved = products.interleaved
        if encoding.value_bits:
            self.name = encoding.name.replace(f"int{encoding.bits}", f"int{encoding.value_bits}")

    def read(self, source: TensorSource, location: Location, numerics: Numerics) -> Weight:
        with threads_for(math.prod(location.shape)):
            return super().read(source, location, numerics)

    def interleaved(self, pieces: Iterable[Weight], num_rows: int) -> InterleavedWeight:
        """The weight of `num_rows`. Pieces of its rows need less memory than the whole; all but the last have a
        multiple of 16."""
        return self._interleaved(self.encoding, pieces, num_rows)


def fused_linear(parts: Sequence[tuple[WeightFormat, Weight]], bias: torch.Tensor | None, kernels: Kernels) -> Linear:
    """The linear layer with the rows of all parts. Several parts have an `InterleavedFormat` each."""
    if len(parts) == 1:
        ((weight_format, weight),) = parts
        return weight_format.linear(weight, bias, kernels)
    interleaved = [f.interleaved([w], len(w[0])) for f, w in parts if isinstance(f, InterleavedFormat)]
    assert len(interleaved) == len(parts), "parts of other formats are joined"
    assert kernels.interleaved_linear is not None
    return kernels.interleaved_linear(interleaved, bias)
