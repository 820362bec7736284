"""All-gather: the operands of a tensor-parallel group's ranks, side by side (protocol: `inboxes.py`)."""

from __future__ import annotations

import torch

from runtime.kernels.collectives.inboxes import (
    EMPTY_OF,
    SMALL_BYTES,
    Inboxes,
    arrived,
    begin,
    clear,
    end,
    launch,
    pieces_of,
    push,
    sendable,
)
from runtime.kernels.triton_language import jit, tl

_MOST_ROWS = 256  # rows in one launch


@jit
def _moving(wanted_ptr, num_rows, SOME: tl.constexpr, MOST_ROWS: tl.constexpr):
    """The running count of moved rows [MOST_ROWS]; the last element counts all rows."""
    rows = tl.arange(0, MOST_ROWS)
    moves = rows < num_rows
    if SOME:
        moves = moves & (tl.load(wanted_ptr + rows, mask=moves, other=0) != 0)
    return tl.cumsum(moves.to(tl.int32), axis=0)


@jit
def _row_of(moving, number):
    """The index of the moved row with this number."""
    return tl.sum((moving <= number).to(tl.int32), axis=0)


@jit(do_not_specialize=["rank", "num_rows", "width"], do_not_specialize_on_alignment=["wanted_ptr"])
def _all_gather_kernel(
    x_ptr,  # [num_rows, width] bits
    out_ptr,  # [num_rows, SIZE * width]
    wanted_ptr,  # [num_rows] int32, read with SOME; 0 for rows that do not move
    addresses_ptr,
    state_ptr,
    num_looks_ptr,
    error_ptr,
    rank,
    inbox_bytes,
    num_rows,
    width,
    SIZE: tl.constexpr,
    EMPTY: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,  # width is a multiple of 16
    PDL: tl.constexpr,
):
    turn, due, old_inbox, extent, num_looks = begin(
        addresses_ptr, state_ptr, num_looks_ptr, rank, inbox_bytes, SIZE, PDL
    )
    if ALIGNED:
        width = width // 16 * 16
    in_row = tl.cdiv(width, BLOCK)  # blocks
    moving = _moving(wanted_ptr, num_rows, SOME, MOST_ROWS)
    num_blocks = tl.max(moving, axis=0) * in_row
    if num_blocks > 0:  # no rank waits without blocks, and a rank that took a turn could reach its next turn too early
        pages = tl.multiple_of(due[0].to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
        for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
            cols = block % in_row * BLOCK + tl.arange(0, BLOCK)
            row = _row_of(moving, block // in_row)
            bits = tl.load(x_ptr + row * width + cols, mask=cols < width, other=0)
            at = (block * SIZE + rank) * BLOCK + tl.arange(0, BLOCK)
            push(sendable(bits, EMPTY), due, at, cols < width, SIZE)
        clear(old_inbox, extent)
        for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
            cols = block % in_row * BLOCK + tl.arange(0, BLOCK)
            out_row = out_ptr + _row_of(moving, block // in_row).to(tl.int64) * SIZE * width
            for owner in range(SIZE):
                page = pages + (block * SIZE + owner) * BLOCK + tl.arange(0, BLOCK)
                bits, num_looks = arrived(page, cols < width, error_ptr, num_looks, owner, EMPTY)
                tl.store(out_row + owner * width + cols, bits, mask=cols < width)
        words = num_blocks * SIZE * BLOCK * (x_ptr.dtype.element_ty.primitive_bitwidth // 16) // 2
        end(state_ptr, turn, words, num_looks)


def all_gather_triton(inboxes: Inboxes, x: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
    """[n, size * width] from each rank's contiguous x [n, width]. Rows where `wanted` [n] int32 is 0 do not move.

    One row of all ranks must fit into an inbox."""
    (num_rows, width), size, num_bytes = x.shape, inboxes.size, x.element_size()
    out = x.new_empty(num_rows, size * width)
    is_small = x.nbytes <= SMALL_BYTES
    block = 1024 if is_small else 4096
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[num_bytes]
    most = inboxes.inbox_bytes // (size * num_bytes * block * -(-width // block))
    for piece in pieces_of(num_rows, min(most, _MOST_ROWS)):
        part = x[piece].view(bits)
        launch(
            _all_gather_kernel, inboxes, part, out[piece].view(bits), part if wanted is None else wanted[piece],
            num_rows=len(part), width=width, SOME=wanted is not None, MOST_ROWS=_MOST_ROWS, EMPTY=EMPTY_OF[num_bytes],
            BLOCK=block, ALIGNED=width % 16 == 0, num_warps=4 if is_small else 8,
        )  # fmt: skip
    return out
