"""Quantized weights: read by their layout, and then widened, or left as codes on the device."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from runtime.kernels.experts.moe_w16a16 import ExpertLayer
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.numerics import Numerics
from runtime.kernels.table import Kernels
from runtime.quant.checkpoint_layouts import Layout
from runtime.quant.dense import Dense
from runtime.quant.encodings import Form
from runtime.quant.products import Products
from runtime.quant.threads import threads_for
from runtime.quant.weight_format import Location, Shape, StoredTensor, TensorSource, Weight, WeightFormat
from runtime.spec.decoder_spec import ExpertsSpec
from runtime.spec.sharding import Part


class Widened(Dense):
    """Codes in the checkpoint; dense weights of the same numbers on the device, which every product takes."""

    def __init__(self, layout: Layout, form: Form) -> None:
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


class Kept(WeightFormat):
    """Codes in the checkpoint and on the device, whose products multiply with them."""

    def __init__(self, layout: Layout, form: Form, products: Products) -> None:
        self._layout, self.form, self._products = layout, form, products
        self.name = form.name

    def stored(self, location: Location) -> dict[str, StoredTensor]:
        return self._layout.stored(location)

    def device_bytes(self, shape: Shape, numerics: Numerics) -> int:
        return self._products.device_bytes(self.form, shape)

    def widens(self, shape: Shape) -> bool:
        """True if a product of many rows makes a dense copy of a weight of this shape."""
        return self._products.widens(self.form, shape)

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
