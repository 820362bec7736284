"""Copies between a cache's blocks and the slots of a tier.

In a layer-major cache a block is many runs of memory. In a slot they lie end to end, so that one copy moves a slot to
the host. All sizes count words of 8 bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.kernels.triton_language import jit, tl

_BLOCK = 2048  # words that a program copies


class BlockRuns(NamedTuple):
    """A block, or a state's part, as runs of memory. Runs have one length and one distance."""

    words: torch.Tensor  # [n] int64, the whole memory
    num_runs: int
    run: int  # words in a run
    stride: int  # words from one run to the next
    block: int  # words from one block to the next

    @property
    def size(self) -> int:
        """Words in a slot."""
        return self.num_runs * self.run


def gather_runs_torch(
    runs: BlockRuns,
    starts: torch.Tensor,  # [n] int64, the first word of each block
    slots: torch.Tensor,  # [n, slot_words] int64
    first: int,  # the slots' word at which the runs begin
) -> None:
    """Copy blocks into slots, on a CPU."""
    for start, slot in zip(starts.tolist(), slots.numpy(), strict=True):
        np.copyto(_parts(slot, first, runs), _block(runs, start))


def scatter_runs_torch(
    runs: BlockRuns,
    starts: torch.Tensor,
    slots: torch.Tensor,
    first: int,
    fits: torch.Tensor,  # [n] bool; false leaves a block as it is
) -> None:
    """Copy slots into blocks, on a CPU."""
    for start, slot, fit in zip(starts.tolist(), slots.numpy(), fits.tolist(), strict=True):
        if fit:
            np.copyto(_block(runs, start), _parts(slot, first, runs))


def _block(runs: BlockRuns, start: int) -> NDArray[np.int64]:
    """A block's memory, [num_runs, run]. Numpy copies in this thread; torch divides even small copies among threads."""
    found: NDArray[np.int64] = runs.words.as_strided((runs.num_runs, runs.run), (runs.stride, 1), start).numpy()
    return found


def _parts(slot: NDArray[np.int64], first: int, runs: BlockRuns) -> NDArray[np.int64]:
    """A slot's memory for the runs."""
    return slot[first : first + runs.size].reshape(runs.num_runs, runs.run)


@jit(do_not_specialize_on_alignment=["starts_ptr", "fits_ptr"])
def _copy_runs_kernel(
    words_ptr,  # the cache's memory
    starts_ptr,  # [n]
    slots_ptr,  # [n, slot_words]
    fits_ptr,  # [n]; not read if TO_SLOTS
    size,
    stride,
    slot_words,
    first,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_SLOTS: tl.constexpr,
):
    item = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if not TO_SLOTS:
        size = tl.where(tl.load(fits_ptr + item) != 0, size, 0)  # a damaged slot is not copied
    inside = at < size
    block = words_ptr + tl.load(starts_ptr + item) + (at // RUN).to(tl.int64) * stride + at % RUN
    slot = slots_ptr + item.to(tl.int64) * slot_words + first + at
    if TO_SLOTS:
        tl.store(slot, tl.load(block, mask=inside), mask=inside)
    else:
        tl.store(block, tl.load(slot, mask=inside), mask=inside)


def gather_runs_triton(runs: BlockRuns, starts: torch.Tensor, slots: torch.Tensor, first: int) -> None:
    """`gather_runs_torch` as one kernel."""
    _launch(runs, starts, slots, first, starts, to_slots=True)


def scatter_runs_triton(
    runs: BlockRuns, starts: torch.Tensor, slots: torch.Tensor, first: int, fits: torch.Tensor
) -> None:
    """`scatter_runs_torch` as one kernel."""
    _launch(runs, starts, slots, first, fits.view(torch.uint8), to_slots=False)


def _launch(
    runs: BlockRuns, starts: torch.Tensor, slots: torch.Tensor, first: int, fits: torch.Tensor, to_slots: bool
) -> None:
    grid = len(starts), -(-runs.size // _BLOCK)
    _copy_runs_kernel[grid](
        runs.words, starts, slots, fits, runs.size, runs.stride, slots.stride(0), first,
        RUN=runs.run, BLOCK=_BLOCK, TO_SLOTS=to_slots, num_warps=4,
    )  # fmt: skip
