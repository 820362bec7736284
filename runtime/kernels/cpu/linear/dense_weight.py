"""Dense weights as compiled kernels read them."""

from __future__ import annotations

from itertools import chain

import torch
import torch.nn.functional as F

from runtime.kernels.cpu.linear import weight_memory
from runtime.kernels.cpu.linear.weight_form import ROWS

_AT_ONCE = 1 << 22  # numbers that are compared at once
_FIRST = 1 << 12  # of them; they show most weights that need float32


def packed_blocks(weight: torch.Tensor) -> torch.Tensor:
    """A copy [blocks, size_in, 16] of a float32 weight [size_out, size_in], in the smallest dtype that is exact.

    Blocks of 16 outputs lie column after column. Numbers of missing outputs are zeros."""
    from runtime.kernels.cpu.linear.pack import pack_dense  # imports llvmlite, which only CPUs need

    (size_out, size_in), weight = weight.shape, weight.contiguous()
    values = weight_memory.empty((-(-size_out // ROWS), size_in, ROWS), exact_dtype(weight))
    whole = size_out // ROWS
    pack_dense(weight, values[:whole])
    if rest := size_out % ROWS:
        pack_dense(F.pad(weight[-rest:], (0, 0, 0, ROWS - rest)), values[whole:])
    return values


def exact_dtype(weight: torch.Tensor) -> torch.dtype:
    """bfloat16 or float16 if it holds all numbers of a float32 weight, else float32."""
    flat = weight.flatten()
    for dtype, holds in ((torch.bfloat16, _are_bfloat16), (torch.float16, _are_float16)):
        if all(map(holds, chain([flat[:_FIRST]], flat[_FIRST:].split(_AT_ONCE)))):
            return dtype
    return torch.float32


def _are_bfloat16(numbers: torch.Tensor) -> bool:
    """True if the lower 16 bits of all float32 numbers are zero. This reads them once, at the speed of memory."""
    return not numbers.view(torch.int16).view(-1, 2)[:, 0].count_nonzero()


def _are_float16(numbers: torch.Tensor) -> bool:
    return torch.equal(numbers.to(torch.float16).float(), numbers)
