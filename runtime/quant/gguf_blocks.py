"""The blocks of GGUF's quantized types (llama.cpp, ggml/src/ggml-common.h) as integers, scales and zero points.

Numbers equal those of the `gguf` package to the bit: both compute scales and zero points in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from runtime.quant.checkpoint_layouts import BlockTensor, CheckpointLayout, exponents
from runtime.quant.scheme import QuantizationScheme
from runtime.quant.weight_format import DENSE, Location, Shape, StoredTensor, Tensors, TensorSource

# Values [..., groups, columns], scales [..., groups], perhaps zero points like scales, and factors [..., 1] of each.
Fields = tuple[torch.Tensor, ...]


class BlockType(NamedTuple):
    """The block of a type."""

    columns: int
    num_bytes: int
    fields: Callable[[torch.Tensor], Fields]


class GgufBlocks(CheckpointLayout):
    """A weight row is a row of blocks, each with its scales and values."""

    def __init__(self, scheme: QuantizationScheme) -> None:
        super().__init__(scheme)
        self._type = TYPES[scheme.layout.split()[-1]]
        self._grid = BlockTensor((torch.uint8,), 1, self._type.columns, size=self._type.num_bytes)

    def block_tensors(self) -> dict[str, BlockTensor]:
        return {"weight": self._grid}

    def stored(self, location: Location) -> dict[str, StoredTensor]:
        return DENSE.stored(location)  # readers of GGUF report the tensor as float32

    def read(self, source: TensorSource, location: Location, device: torch.device) -> Tensors:
        parts = [self._grid.part(part, location.shape, location.name) for part in location.parts]
        blocks = [source.blocks(location.name, self._type.num_bytes, device, part) for part in parts or (None,)]
        weights = [self.unpack({"weight": part}, location.shape) for part in blocks]
        return weights[0] if len(weights) == 1 else self._encoding.join(weights, location.parts[0].dim)

    def unpack(self, tensors: Mapping[str, torch.Tensor], shape: Shape) -> Tensors:
        quantized, *scales = self._type.fields(tensors["weight"])
        return quantized.flatten(1), *(scale.flatten(1) for scale in scales)


def _factor(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block: [..., 1]."""
    return blocks[..., start : start + 2].view(torch.float16)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The same as float32."""
    return _factor(blocks, start).float()


def _shifted(data: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """uint8 [..., n, m] -> [..., n * count, m]: the lowest bits of m bytes, then the next bits."""
    shifts = torch.arange(0, count * bits, bits, dtype=torch.uint8, device=data.device)
    return ((data[..., None, :] >> shifts[:, None]) & ((1 << bits) - 1)).flatten(-3, -2)


def _q8_0(blocks: torch.Tensor) -> Fields:
    return blocks[..., None, 2:].view(torch.int8), _half(blocks, 0)


def _q4_0(blocks: torch.Tensor) -> Fields:
    quantized = _shifted(blocks[..., None, 2:], 2, 4).flatten(-2)
    return quantized[..., None, :].view(torch.int8) - 8, _half(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> Fields:
    quantized = _shifted(blocks[..., None, 4:], 2, 4).flatten(-2)
    return quantized[..., None, :], _half(blocks, 0), -_half(blocks, 2)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Bit i of the four bytes from `start` on is bit 4 of value i: uint8 [..., 32]."""
    data = blocks[..., start : start + 4, None]
    return ((data >> torch.arange(8, dtype=torch.uint8, device=data.device)) & 1).flatten(-2) << 4


def _q5_0(blocks: torch.Tensor) -> Fields:
    low = _shifted(blocks[..., None, 6:], 2, 4).flatten(-2)
    return (low | _fifth_bits(blocks, 2))[..., None, :].view(torch.int8) - 16, _half(blocks, 0)


def _q5_1(blocks: torch.Tensor) -> Fields:
    low = _shifted(blocks[..., None, 8:], 2, 4).flatten(-2)
    return (low | _fifth_bits(blocks, 4))[..., None, :], _half(blocks, 0), -_half(blocks, 2)


def _mxfp4(blocks: torch.Tensor) -> Fields:
    quantized = _shifted(blocks[..., None, 1:], 2, 4).flatten(-2)
    quantized = quantized * (quantized != 8)  # -0, which is 0 here
    return quantized[..., None, :], exponents(blocks[..., :1])


def _of_groups(blocks: torch.Tensor) -> Fields:
    """The scales and zero points of eight groups: 6 bits each in 12 bytes, after a float16 factor for each kind."""
    low, middle, high = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scale = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), -1)
    zero_points = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), -1)
    return scale, zero_points, _factor(blocks, 0), _factor(blocks, 2)


def _q4_k(blocks: torch.Tensor) -> Fields:
    return _shifted(blocks[..., 16:].unflatten(-1, (4, 32)), 2, 4), *_of_groups(blocks)


def _q5_k(blocks: torch.Tensor) -> Fields:
    low = _shifted(blocks[..., 48:].unflatten(-1, (4, 32)), 2, 4)
    return low | _shifted(blocks[..., None, 16:48], 8, 1) << 4, *_of_groups(blocks)


def _q6_k(blocks: torch.Tensor) -> Fields:
    low = _shifted(blocks[..., :128].unflatten(-1, (2, 64)), 2, 4).unflatten(-1, (2, 32)).flatten(-3, -2)
    high = _shifted(blocks[..., 128:192].unflatten(-1, (2, 32)), 4, 2)
    quantized = (low | high << 4).view(torch.int8) - 32
    quantized = quantized.unflatten(-1, (2, 16)).flatten(-3, -2)
    return quantized, blocks[..., 192:208].view(torch.int8), _factor(blocks, 208)


TYPES = {
    "Q8_0": BlockType(32, 34, _q8_0),
    "Q4_0": BlockType(32, 18, _q4_0),
    "Q4_1": BlockType(32, 20, _q4_1),
    "Q5_0": BlockType(32, 22, _q5_0),
    "Q5_1": BlockType(32, 24, _q5_1),
    "Q4_K": BlockType(256, 144, _q4_k),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
    "MXFP4": BlockType(32, 17, _mxfp4),
}
