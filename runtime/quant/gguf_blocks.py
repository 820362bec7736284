"""The blocks of GGUF's quantized types (llama.cpp, ggml/src/ggml-common.h) as whole numbers, scales and minimums.

Numbers are those of the `gguf` package to the bit: scales and minimums are made in float32, as there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from runtime.quant.checkpoint_layouts import BlockTensor, CheckpointLayout
from runtime.quant.scheme import QuantizationScheme
from runtime.quant.weight_format import DENSE, Location, Shape, StoredTensor, TensorSource, Weight

Fields = tuple[
    torch.Tensor, ...
]  # of blocks [..., bytes]: codes [..., groups, columns], scales [..., groups], minimums


class BlockType(NamedTuple):
    """A type's block."""

    columns: int
    num_bytes: int
    fields: Callable[[torch.Tensor], Fields]


class GgufBlocks(CheckpointLayout):
    """A row of the weight is a row of blocks, each with its scales and codes."""

    def __init__(self, scheme: QuantizationScheme) -> None:
        super().__init__(scheme)
        self._type = TYPES[scheme.layout.split()[-1]]
        self._grid = BlockTensor((torch.uint8,), 1, self._type.columns, size=self._type.num_bytes)

    def block_tensors(self) -> dict[str, BlockTensor]:
        return {"weight": self._grid}

    def stored(self, location: Location) -> dict[str, StoredTensor]:
        return DENSE.stored(location)  # readers of GGUF call the tensor's numbers float32

    def read(self, source: TensorSource, location: Location, device: torch.device) -> Weight:
        parts = [self._grid.part(part, location.shape, location.name) for part in location.parts]
        blocks = [source.blocks(location.name, self._type.num_bytes, device, part) for part in parts or (None,)]
        return self._form.join([self.unpack({"weight": part}, location.shape) for part in blocks])

    def unpack(self, tensors: Mapping[str, torch.Tensor], shape: Shape) -> Weight:
        codes, *scales = self._type.fields(tensors["weight"])
        return codes.flatten(1), *(scale.flatten(1) for scale in scales)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at a byte of each block, as float32 [..., 1]."""
    return blocks[..., start : start + 2].view(torch.float16).float()


def _shifted(data: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """uint8 [..., n, m] -> [..., n * count, m]: the lowest bits of a run of m bytes, then the next ones."""
    shifts = torch.arange(0, count * bits, bits, dtype=torch.uint8, device=data.device)
    return ((data[..., None, :] >> shifts[:, None]) & ((1 << bits) - 1)).flatten(-3, -2)


def _q8_0(blocks: torch.Tensor) -> Fields:
    return blocks[..., None, 2:].view(torch.int8), _half(blocks, 0)


def _q4_0(blocks: torch.Tensor) -> Fields:
    codes = _shifted(blocks[..., None, 2:], 2, 4).flatten(-2)
    return codes[..., None, :].view(torch.int8) - 8, _half(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> Fields:
    codes = _shifted(blocks[..., None, 4:], 2, 4).flatten(-2)
    return codes[..., None, :], _half(blocks, 0), -_half(blocks, 2)


def _of_groups(blocks: torch.Tensor) -> Fields:
    """The scales and minimums of eight groups, with 6 bits each in 12 bytes and a float16 for all before them."""
    low, middle, high = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scale = torch.cat((low & 63, (high & 15) | ((low >> 2) & 48)), -1)
    minimum = torch.cat((middle & 63, (high >> 4) | ((middle >> 2) & 48)), -1)
    return _half(blocks, 0) * scale, _half(blocks, 2) * minimum


def _q4_k(blocks: torch.Tensor) -> Fields:
    return _shifted(blocks[..., 16:].unflatten(-1, (4, 32)), 2, 4), *_of_groups(blocks)


def _q5_k(blocks: torch.Tensor) -> Fields:
    low = _shifted(blocks[..., 48:].unflatten(-1, (4, 32)), 2, 4)
    return low | _shifted(blocks[..., None, 16:48], 8, 1) << 4, *_of_groups(blocks)


def _q6_k(blocks: torch.Tensor) -> Fields:
    low = _shifted(blocks[..., :128].unflatten(-1, (2, 64)), 2, 4).unflatten(-1, (2, 32)).flatten(-3, -2)
    high = _shifted(blocks[..., 128:192].unflatten(-1, (2, 32)), 4, 2)
    codes = (low | high << 4).view(torch.int8) - 32
    return codes.unflatten(-1, (2, 16)).flatten(-3, -2), _half(blocks, 208) * blocks[..., 192:208].view(torch.int8)


TYPES = {
    "Q8_0": BlockType(32, 34, _q8_0),
    "Q4_0": BlockType(32, 18, _q4_0),
    "Q4_1": BlockType(32, 20, _q4_1),
    "Q4_K": BlockType(256, 144, _q4_k),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
}
