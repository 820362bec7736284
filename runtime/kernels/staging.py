"""Staged writes: what the host changes in the requests' device state goes up in one copy and is scattered here, in
stream order with the steps that read it (C2)."""

from __future__ import annotations

import torch

from runtime.kernels._triton import jit, tl

_BLOCK = 1024  # values written at a time


def apply_runs_torch(
    state: torch.Tensor,  # [size] int32, the state as one line
    staged: torch.Tensor,  # [2 + 2 * num_runs + num_values] int32, and whatever follows:
    # whether it was applied, num_runs, of each run its first place in the state, and of each its length; the values of
    # all, end to end. Runs are disjoint.
    num_programs: int,
) -> None:
    """Write the runs' values to their places, unless it was done."""
    applied, num_runs = staged[:2].tolist()
    if applied:
        return
    places, lengths = staged[2 : 2 + 2 * num_runs].view(2, num_runs).tolist()
    values = staged[2 + 2 * num_runs :]
    for place, length in zip(places, lengths, strict=True):
        state[place : place + length] = values[:length]
        values = values[length:]


@jit(do_not_specialize_on_alignment=["staged_ptr"])
def _apply_runs_kernel(
    state_ptr,  # [size] int32
    staged_ptr,  # as apply_runs_torch has it
    BLOCK: tl.constexpr,
):
    num_runs = tl.where(tl.load(staged_ptr) == 0, tl.load(staged_ptr + 1), 0)
    lengths_ptr = staged_ptr + 2 + num_runs
    lanes = tl.arange(0, BLOCK)
    for run in range(tl.program_id(0), num_runs, tl.num_programs(0)):
        first = 0
        for at in range(0, run, BLOCK):
            first += tl.sum(tl.load(lengths_ptr + at + lanes, mask=at + lanes < run, other=0))
        place = tl.load(staged_ptr + 2 + run)
        length = tl.load(lengths_ptr + run)
        values_ptr = lengths_ptr + num_runs + first
        for at in range(0, length, BLOCK):
            values = tl.load(values_ptr + at + lanes, mask=at + lanes < length)
            tl.store(state_ptr + place + at + lanes, values, mask=at + lanes < length)


def apply_runs(state: torch.Tensor, staged: torch.Tensor, num_programs: int) -> None:
    """`apply_runs_torch` as one kernel, which finds on the device how much there is to do."""
    _apply_runs_kernel[(num_programs,)](state, staged, BLOCK=_BLOCK, num_warps=4)
