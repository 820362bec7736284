"""DenseWeight: a dense weight as compiled kernels read it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F

from runtime.kernels.cpu.linear import weight_memory
from runtime.kernels.cpu.linear.interleaved_weight import ROWS

_AT_ONCE = 1 << 22  # numbers that are compared at once
_FIRST = 1 << 12  # of them; they show most weights that need float32


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Blocks of 16 outputs, column after column, in the smallest dtype that holds all numbers exactly."""

    values: torch.Tensor  # [blocks, size_in, 16]; numbers of missing outputs are zeros
    size_out: int


def dense_weight(weight: torch.Tensor) -> DenseWeight:
    """A copy of a float32 weight [size_out, size_in]."""
    from runtime.kernels.cpu.linear.pack import pack_dense  # imports llvmlite, which only CPUs need

    (size_out, size_in), weight = weight.shape, weight.contiguous()
    values = weight_memory.empty((-(-size_out // ROWS), size_in, ROWS), exact_dtype(weight))
    whole = size_out // ROWS
    pack_dense(weight, values[:whole])
    if rest := size_out % ROWS:
        pack_dense(F.pad(weight[-rest:], (0, 0, 0, ROWS - rest)), values[whole:])
    return DenseWeight(values, size_out)


def exact_dtype(weight: torch.Tensor) -> torch.dtype:
    """bfloat16 or float16 if it holds all numbers of a float32 weight, else float32."""
    flat = weight.flatten()
    for dtype in (torch.bfloat16, torch.float16):
        pieces = chain([flat[:_FIRST]], flat[_FIRST:].split(_AT_ONCE))
        if all(torch.equal(piece.to(dtype).float(), piece) for piece in pieces):
            return dtype
    return torch.float32
