"""Staged writes: what the host changes in the requests' device state goes up in one copy and is scattered here, in
stream order with the steps that read it (C2)."""

from __future__ import annotations

import torch

from runtime.kernels._triton import jit, tl

_BLOCK = 1024  # values of a program


def apply_runs_torch(
    state: torch.Tensor,  # [size] int32, the state as one line
    runs: torch.Tensor,  # [3, num_runs] int32: first place in state, first value, number of values; runs are disjoint
    values: torch.Tensor,  # [num_values] int32
    max_length: int,  # of a run
) -> None:
    """state[place : place + length] = values[first : first + length] for every run."""
    for place, first, length in runs.t().tolist():
        state[place : place + length] = values[first : first + length]


@jit(do_not_specialize=["num_runs"], do_not_specialize_on_alignment=["values_ptr"])
def _apply_runs_kernel(
    state_ptr,  # [size] int32
    runs_ptr,  # [3, num_runs] int32 contiguous
    values_ptr,  # [num_values] int32
    num_runs,
    BLOCK: tl.constexpr,
):
    run = tl.program_id(0)
    place = tl.load(runs_ptr + run)
    first = tl.load(runs_ptr + num_runs + run)
    length = tl.load(runs_ptr + 2 * num_runs + run)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(values_ptr + first + at, mask=at < length)
    tl.store(state_ptr + place + at, values, mask=at < length)


def apply_runs(state: torch.Tensor, runs: torch.Tensor, values: torch.Tensor, max_length: int) -> None:
    """`apply_runs_torch` as one kernel, without a wait for the host."""
    num_runs = runs.shape[1]
    if num_runs:
        grid = (num_runs, -(-max_length // _BLOCK))
        _apply_runs_kernel[grid](state, runs, values, num_runs, BLOCK=_BLOCK, num_warps=4)
