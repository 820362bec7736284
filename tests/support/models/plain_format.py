"""A format for weights of every encoding, in torch: they stay quantized in tests without a kernel."""

from collections.abc import Iterable

import torch

from runtime.kernels.numerics import Numerics
from runtime.quant.checkpoint_layouts import unpack_nibbles
from runtime.quant.encodings import Encoding, Integer4
from runtime.quant.quantized_formats import QuantizedFormat
from runtime.quant.weight_format import Shape, Tensors


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Codes from 0 to 15, uint8 [..., 2 * n] -> uint8 [..., n], the low nibble first."""
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    packed: torch.Tensor = low | high << 4
    return packed


class PlainFormat(QuantizedFormat):
    """Two 4-bit values are a byte, the low nibble first; kernels get dense copies."""

    @staticmethod
    def takes(encoding: Encoding) -> bool:
        return True

    @staticmethod
    def fits(encoding: Encoding, shape: Shape) -> bool:
        return True

    def packed(self, weight: Tensors) -> Tensors:
        codes, *more = weight
        return (pack_nibbles(codes.view(torch.uint8) & 15) if self.encoding.bits == 4 else codes), *more

    def unpacked(self, weight: Tensors) -> Tensors:
        codes, *more = weight
        if self.encoding.bits == 8:
            return weight
        codes = unpack_nibbles(codes)
        is_signed = isinstance(self.encoding, Integer4) and not self.encoding.has_zero_points
        return (codes ^ 8).view(torch.int8) - 8 if is_signed else codes, *more

    def device_bytes(self, shape: Shape, numerics: Numerics) -> int:
        return self.encoding.device_bytes(shape)

    def operand(self, pieces: Iterable[Tensors], num_rows: int) -> torch.Tensor:
        (weight,) = pieces
        return self.encoding.dequantize(self.unpacked(weight), self.numerics.dtype)
