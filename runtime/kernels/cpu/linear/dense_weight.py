"""DenseWeight: a dense weight as compiled kernels read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from runtime.kernels.cpu.linear import weight_memory
from runtime.kernels.cpu.linear.interleaved_weight import ROWS

_AT_ONCE = 1 << 22  # numbers that are compared at once


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Blocks of 16 outputs, column after column, in the smallest dtype that holds all numbers exactly."""

    values: torch.Tensor  # [blocks, size_in, 16]; numbers of missing outputs are zeros
    size_out: int


def dense_weight(weight: torch.Tensor) -> DenseWeight:
    """A copy of a float32 weight [size_out, size_in]."""
    size_out, size_in = weight.shape
    values = weight_memory.empty((-(-size_out // ROWS), size_in, ROWS), exact_dtype(weight))
    step = max(1, _AT_ONCE // (size_in * ROWS)) * ROWS
    for first in range(0, size_out, step):
        rows = weight[first : first + step]
        blocks = F.pad(rows, (0, 0, 0, -len(rows) % ROWS)).reshape(-1, ROWS, size_in)
        values[first // ROWS : first // ROWS + len(blocks)] = blocks.transpose(1, 2)
    return DenseWeight(values, size_out)


def exact_dtype(weight: torch.Tensor) -> torch.dtype:
    """bfloat16 or float16 if it holds all numbers of a float32 weight, else float32."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(piece.to(dtype).float(), piece) for piece in weight.flatten().split(_AT_ONCE)):
            return dtype
    return torch.float32
