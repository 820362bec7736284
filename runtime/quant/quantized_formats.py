"""Quantized weights: read by their layout, and then widened, or left as codes on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from runtime.kernels.experts.moe_w16a16 import ExpertLayer
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.numerics import Numerics
from runtime.kernels.table import Kernels
from runtime.quant.checkpoint_layouts import CheckpointLayout
from runtime.quant.encodings import Encoding
from runtime.quant.products import QuantizedProducts
from runtime.quant.weight_format import DenseFormat, Location, Shape, StoredTensor, TensorSource, Weight, WeightFormat
from runtime.spec.decoder_spec import ExpertsSpec
from runtime.spec.sharding import Part

_SMALL = 1 << 20  # numbers of a weight that one thread dequantizes


@contextmanager
def threads_for(num_values: int) -> Iterator[None]:
    """Let one thread work on a small weight, and all of them on a large one.

    Threads wait for one another after every operation on a tensor. Where other programs have the cores, thousands of
    such waits on small weights took ten times the work itself."""
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
    """Codes in the checkpoint; dense weights of the same numbers on the device, which every product takes."""

    def __init__(self, layout: CheckpointLayout, form: Encoding) -> None:
        self._layout, self.form = layout, form
        self.name = form.name

    def stored(self, location: Location) -> dict[str, StoredTensor]:
        return self._layout.stored(location)

    def read(self, source: TensorSource, location: Location, numerics: Numerics) -> Weight:
        if self.form.reordered and location.parts[:1] and location.parts[0].dim == 1:
            ((_, start, stop),) = location.parts  # columns of a rank are of all groups
            return (self.read(source, location._replace(parts=()), numerics)[0][:, start:stop].contiguous(),)
        with threads_for(math.prod(location.shape)):
            return (self.form.dequantize(self._layout.read(source, location, numerics.device), numerics.dtype),)


class QuantizedFormat(WeightFormat):
    """Codes in the checkpoint and on the device, whose products multiply with them."""

    def __init__(self, layout: CheckpointLayout, form: Encoding, products: QuantizedProducts) -> None:
        self._layout, self.form, self._products = layout, form, products
        self.name = form.name

    def stored(self, location: Location) -> dict[str, StoredTensor]:
        return self._layout.stored(location)

    def device_bytes(self, shape: Shape, numerics: Numerics) -> int:
        return self._products.device_bytes(self.form, shape)

    def dequantizes(self, shape: Shape) -> bool:
        """True if a product of many rows makes a dense copy of a weight of this shape."""
        return self._products.dequantizes(self.form, shape)

    def read(self, source: TensorSource, location: Location, numerics: Numerics) -> Weight:
        return self._products.packed(self.form, self._layout.read(source, location, numerics.device))

    def encode(self, dense: torch.Tensor, parts: tuple[Part, ...] = ()) -> Weight:
        whole = self.form.encode(dense)
        pieces = [self.form.part(whole, part) for part in parts]
        return self._products.packed(self.form, self.form.join(pieces) if pieces else whole)

    def linear(self, weight: Weight, bias: torch.Tensor | None, kernels: Kernels) -> Linear:
        return self._products.linear(self.form, weight, bias, kernels)

    def experts(
        self, spec: ExpertsSpec, router: Linear, weights: Iterable[tuple[Weight, Weight]], kernels: Kernels
    ) -> ExpertLayer:
        return self._products.experts(self.form, spec, router, weights, kernels)
