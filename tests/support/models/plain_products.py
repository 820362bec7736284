"""Products with quantized weights of every format, in torch: weights stay quantized in tests without a kernel."""

import torch
import torch.nn.functional as F

from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.table import Kernels
from runtime.quant.checkpoint_layouts import unpack_nibbles
from runtime.quant.encodings import Encoding, Integer4
from runtime.quant.products import QuantizedProducts
from runtime.quant.weight_format import Shape, Weight


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes from 0 to 15, uint8 [..., 2 * n] -> uint8 [..., n], the low nibble first."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    packed: torch.Tensor = low | high << 4
    return packed


class PlainProducts(QuantizedProducts):
    """Two 4-bit values are a byte, the low nibble first; each product dequantizes the weight again."""

    def takes(self, form: Encoding) -> bool:
        return True

    def fits(self, form: Encoding, shape: Shape) -> bool:
        return True

    def packed(self, form: Encoding, weight: Weight) -> Weight:
        codes, *more = weight
        return (pack_nibbles(codes.view(torch.uint8) & 15) if form.bits == 4 else codes), *more

    def unpacked(self, form: Encoding, weight: Weight) -> Weight:
        codes, *more = weight
        if form.bits == 8:
            return weight
        codes = unpack_nibbles(codes)
        is_signed = isinstance(form, Integer4) and not form.has_zero_points
        return (codes ^ 8).view(torch.int8) - 8 if is_signed else codes, *more

    def device_bytes(self, form: Encoding, shape: Shape) -> int:
        return form.device_bytes(shape)

    def linear(self, form: Encoding, weight: Weight, bias: torch.Tensor | None, kernels: Kernels) -> Linear:
        def product(x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, form.dequantize(self.unpacked(form, weight), x.dtype), bias)

        return Linear(product, kernels.norm, kernels.activate)


PLAIN = PlainProducts()
