"""Split-K: several programs sum parts of K for one tile, and the last program to arrive adds the parts in order.

The result does not depend on which program is last."""

from __future__ import annotations

from functools import cache

import torch

from runtime.kernels.triton_language import jit, tl

MAX_SPLIT_TILES = 1024  # tiles in a split product; each has an arrival counter


@cache
def split_counters(device: torch.device) -> torch.Tensor:
    """The arrival counters of split products: int32 zeros between launches."""
    return torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)


@jit
def store_part(sums_ptr, size, at, part, mask, counters_ptr):
    """Store this program's part of a tile and count its arrival; return how many parts arrived before it.

    Part i lies at `sums_ptr + i * size + at`."""
    tl.store(sums_ptr + tl.program_id(1) * size + at, part, mask=mask)
    tl.debug_barrier()  # this program's stores come before its arrival
    return tl.atomic_add(counters_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu")


@jit
def add_parts(sums_ptr, size, at, mask, counters_ptr, NUM_PARTS: tl.constexpr):
    """The sum of all parts in ascending order. Clears the counter for the next launch."""
    tl.store(counters_ptr + tl.program_id(0), 0)
    total = tl.load(sums_ptr + at, mask=mask, other=0.0, cache_modifier=".cg")
    for i in tl.static_range(1, NUM_PARTS):
        total += tl.load(sums_ptr + i * size + at, mask=mask, other=0.0, cache_modifier=".cg")
    return total
