"""Product tiles: their order, their parts of K, and how a kernel stores one."""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.linear.split_k import MAX_SPLIT_TILES, split_counters
from runtime.kernels.triton_language import INTERPRETED, TensorDescriptor, constexpr, jit, tl

_ADDS = constexpr(not INTERPRETED)  # the copy engine adds in the residual's dtype
_GROUP = constexpr(8)  # neighbouring programs with different x tiles and the same weight tile


class Tiling(NamedTuple):
    """How tiles cover a product. It does not affect a sum's order, except that `split` orders parts of K."""

    block_m: int  # x rows
    block_n: int  # weight rows
    block_k: int  # columns per step, unless the weight's layout fixes them
    num_warps: int
    stages: int
    split: int = 1  # parts of K that programs sum side by side
    swap: bool = False  # the weight rows, not x rows, are the matrix instruction's rows

    def num_tiles(self, num_rows: int, size_out: int) -> int:
        return -(-num_rows // self.block_m) * -(-size_out // self.block_n)

    def parts(self, num_rows: int, size_out: int, out: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
        """How many parts K has, the buffer for their sums, and their arrival counters.

        With one part both buffers are `out`: the kernel needs pointers, but does not use them."""
        num_tiles = self.num_tiles(num_rows, size_out)
        if self.split == 1 or num_tiles > MAX_SPLIT_TILES:
            return 1, out, out
        size = num_tiles * self.split * self.block_m * self.block_n
        return self.split, torch.empty(size, dtype=torch.float32, device=out.device), split_counters(out.device)


def output_of(
    x: torch.Tensor,
    width: int,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """The tensor [num_rows, width] that a product writes: the residual, `out`, or a new one in x's dtype by default."""
    if residual is not None:
        return residual
    return torch.empty((len(x), width), dtype=out_dtype or x.dtype, device=x.device) if out is None else out


def multiplies_fp8(device: torch.device) -> bool:
    """True if the device has matrix units for e4m3, and a copy engine (TMA)."""
    return INTERPRETED or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0))


def blocks_of(tensor: torch.Tensor, *block: int) -> TensorDescriptor:
    """A descriptor with which the copy engine (TMA) loads blocks of a matrix."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(block))


@jit
def tile_place(tile, num_rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile's first x row and first weight row; neighbouring tiles share the weight rows."""
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group_start = tile // (_GROUP * tiles_n) * _GROUP
    group_size = tl.minimum(tiles_m - group_start, _GROUP)
    within = tile % (_GROUP * tiles_n)
    return (group_start + within % group_size) * BLOCK_M, within // group_size * BLOCK_N


@jit
def part_of(K, SPLIT: tl.constexpr, BLOCK_K: tl.constexpr):
    """The first column in this program's part of K, and the column after its last."""
    size = tl.cdiv(tl.cdiv(K, SPLIT), BLOCK_K) * BLOCK_K
    first = tl.program_id(1) * size
    return first, tl.minimum(first + size, K)


@jit
def keep_part(sums_ptr, counters_ptr, total, SPLIT: tl.constexpr):
    """Store this program's part of a tile and count its arrival; return how many parts arrived before it.

    A tile's parts lie one behind another and are not masked, unlike `store_part`'s parts."""
    size: tl.constexpr = total.shape[0] * total.shape[1]
    tl.store(_first_part(sums_ptr, total, SPLIT) + tl.program_id(1) * size, total)
    tl.debug_barrier()  # this program's stores come before its arrival
    return tl.atomic_add(counters_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu")


@jit
def sum_parts(sums_ptr, counters_ptr, total, SPLIT: tl.constexpr):
    """The sum of all parts in ascending order. Clears the counter for the next launch."""
    size: tl.constexpr = total.shape[0] * total.shape[1]
    tl.store(counters_ptr + tl.program_id(0), 0)
    sums = _first_part(sums_ptr, total, SPLIT)
    total = tl.load(sums, cache_modifier=".cg")
    for other in tl.static_range(1, SPLIT):
        total += tl.load(sums + other * size, cache_modifier=".cg")
    return total


@jit
def _first_part(sums_ptr, total, SPLIT: tl.constexpr):
    outer, inner = tl.arange(0, total.shape[0]), tl.arange(0, total.shape[1])
    first = sums_ptr + tl.program_id(0) * (SPLIT * total.shape[0] * total.shape[1])
    return first + outer[:, None] * total.shape[1] + inner[None, :]


@jit
def store_tile(outs, y, token, row, RESIDUAL: tl.constexpr):
    """Store a tile [BLOCK_M, BLOCK_N], or add it with RESIDUAL."""
    if RESIDUAL and _ADDS:
        outs.atomic_add([token, row], y)
    elif RESIDUAL:
        y = y.to(tl.float32) + outs.load([token, row]).to(tl.float32)
        outs.store([token, row], y.to(outs.dtype))
    else:
        outs.store([token, row], y)
