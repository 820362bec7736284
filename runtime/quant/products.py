"""Products with weights that stay codes: which forms they take, and how a weight lies on their device."""

from __future__ import annotations

from typing import Protocol

import torch

from runtime.kernels import Kernels
from runtime.kernels.linear import Linear
from runtime.kernels.numerics import Numerics
from runtime.quant.format import Shape, Weight
from runtime.quant.forms import Form


class Products(Protocol):
    """The products of one backend, on one kind of device."""

    experts: bool  # those of mixtures, too

    def takes(self, form: Form) -> bool:
        """True if weights of the form can stay codes; of those that the form itself says fit (`Form.fits`)."""

    def fits(self, form: Form, shape: Shape) -> bool:
        """True if a weight of this shape, in a form that is taken, can stay codes."""

    def packed(self, form: Form, weight: Weight) -> Weight:
        """A form's weight as it stays on the device: tensors with as many rows for a block of the weight's as the
        form's have, so that those of the parts of a fused map can be joined (`WeightFormat.join`)."""

    def device_bytes(self, form: Form, shape: Shape) -> int:
        """The bytes of a weight on the device."""

    def linear(self, form: Form, weight: Weight, bias: torch.Tensor | None, kernels: Kernels) -> Linear:
        """The product with a packed weight, and what surrounds it in a decoder."""


def products_of(numerics: Numerics) -> Products | None:
    """The products of a backend; None: it has none, so that all weights are widened."""
    return None
