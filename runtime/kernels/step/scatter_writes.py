"""Staged writes: one copy brings the host's changes of the requests' device state, and a kernel scatters them.

Both are in stream order with the steps that read the state (C2)."""

from __future__ import annotations

import torch

from runtime.kernels.triton_language import jit, tl

_BLOCK = 1024  # values written at a time


def scatter_writes_torch(
    state: torch.Tensor,  # [size] int32, the state as one line
    writes: torch.Tensor,  # [1 + 2 * num_writes + num_values] int32, perhaps longer: num_writes, each write's first
    # place in the state, each length, then all values end to end. Writes do not overlap.
) -> None:
    """Write the values to their places."""
    num_writes = int(writes[0])
    places, lengths = writes[1 : 1 + 2 * num_writes].view(2, num_writes).tolist()
    values = writes[1 + 2 * num_writes :]
    for place, length in zip(places, lengths, strict=True):
        state[place : place + length] = values[:length]
        values = values[length:]


@jit
def apply_writes(
    state_ptr,  # [size]
    writes_ptr,  # see `writes`, after num_writes
    num_writes,
    BLOCK: tl.constexpr,
):
    """This program's share of the writes."""
    lengths_ptr = writes_ptr + num_writes
    lanes = tl.arange(0, BLOCK)
    for write in range(tl.program_id(0), num_writes, tl.num_programs(0)):
        values_ptr = lengths_ptr + num_writes
        for at in range(0, write, BLOCK):
            values_ptr += tl.sum(tl.load(lengths_ptr + at + lanes, mask=at + lanes < write, other=0))
        place = tl.load(writes_ptr + write)
        length = tl.load(lengths_ptr + write)
        for at in range(0, length, BLOCK):
            values = tl.load(values_ptr + at + lanes, mask=at + lanes < length)
            tl.store(state_ptr + place + at + lanes, values, mask=at + lanes < length)


@jit(do_not_specialize_on_alignment=["writes_ptr"])
def _scatter_writes_kernel(
    state_ptr,  # [size]
    writes_ptr,  # as scatter_writes_torch has it
    BLOCK: tl.constexpr,
):
    apply_writes(state_ptr, writes_ptr + 1, tl.load(writes_ptr), BLOCK)


def scatter_writes(state: torch.Tensor, writes: torch.Tensor, num_writes: int) -> None:
    """`scatter_writes_torch` as one kernel, with a program for each of the `num_writes`."""
    if num_writes:
        _scatter_writes_kernel[(num_writes,)](state, writes, BLOCK=_BLOCK, num_warps=4)
