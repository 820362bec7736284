"""Staged writes: what the host changes in the requests' device state goes up in one copy and is scattered here, in
stream order with the steps that read it (C2)."""

from __future__ import annotations

import torch

from runtime.kernels._triton import jit, tl

_BLOCK = 1024  # values written at a time


def apply_runs_torch(
    state: torch.Tensor,  # [size] int32, the state as one line
    staged: torch.Tensor,  # [1 + 2 * num_runs + num_values] int32, and whatever follows:
    # num_runs; of each run its first place in the state; of each its length; the values of all, end to end.
    # No place is written twice.
) -> None:
    """Write the runs' values to their places."""
    num_runs = int(staged[0])
    places, lengths = staged[1 : 1 + 2 * num_runs].view(2, num_runs).tolist()
    values = staged[1 + 2 * num_runs :]
    for place, length in zip(places, lengths, strict=True):
        state[place : place + length] = values[:length]
        values = values[length:]


@jit
def write_runs(
    state_ptr,  # [size]
    runs_ptr,  # as in `staged`, after num_runs
    num_runs,
    BLOCK: tl.constexpr,
):
    """This program's share of the runs."""
    lengths_ptr = runs_ptr + num_runs
    lanes = tl.arange(0, BLOCK)
    for run in range(tl.program_id(0), num_runs, tl.num_programs(0)):
        values_ptr = lengths_ptr + num_runs
        for at in range(0, run, BLOCK):
            values_ptr += tl.sum(tl.load(lengths_ptr + at + lanes, mask=at + lanes < run, other=0))
        place = tl.load(runs_ptr + run)
        length = tl.load(lengths_ptr + run)
        for at in range(0, length, BLOCK):
            values = tl.load(values_ptr + at + lanes, mask=at + lanes < length)
            tl.store(state_ptr + place + at + lanes, values, mask=at + lanes < length)


@jit(do_not_specialize_on_alignment=["staged_ptr"])
def _apply_runs_kernel(
    state_ptr,  # [size]
    staged_ptr,  # as apply_runs_torch has it
    BLOCK: tl.constexpr,
):
    write_runs(state_ptr, staged_ptr + 1, tl.load(staged_ptr), BLOCK)


def apply_runs(state: torch.Tensor, staged: torch.Tensor, num_runs: int) -> None:
    """`apply_runs_torch` as one kernel, with a program for each of the `num_runs`."""
    if num_runs:
        _apply_runs_kernel[(num_runs,)](state, staged, BLOCK=_BLOCK, num_warps=4)
