"""All-reduce: sums and maxima over a tensor-parallel group's ranks (protocol: `inboxes.py`).

Small operands go to every rank, and each rank adds them in rank order (`_one_shot_kernel`). Blocks of large
operands go to the rank that owns the block. It adds them to the residual, which is the same on all ranks, and sends the
result to the others (`_two_shot_kernel`). Both kernels return the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

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
    missing_of,
    pieces_of,
    push,
    sendable,
)
from runtime.kernels.triton_language import jit, tl

_BITS = {2: tl.int16, 4: tl.int32, 8: tl.int64} if tl is not None else {}


def sum_partials_torch(partials: Sequence[torch.Tensor], tree: bool = False) -> torch.Tensor:
    """The float32 sum of partials by rank, in rank order or as a binary tree.

    With the tree, 2, 4 and 8 ranks get the sum that one rank gets from eight partials."""
    sums = [partial.float() for partial in partials]
    if not tree:
        total = sums[0] + sums[1]
        for partial in sums[2:]:
            total += partial
        return total
    while len(sums) > 1:
        pairs = zip(sums[::2], sums[1::2], strict=False)
        sums = [left + right for left, right in pairs] + sums[len(sums) & ~1 :]
    return sums[0]


@jit
def _reduced(
    page,
    inside,
    error_ptr,
    num_looks,
    VALUE: tl.constexpr,
    EMPTY: tl.constexpr,
    OP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Wait for SIZE consecutive pages; return their sum or maximum, and the polls left for the next wait.

    No polls are left after a failed wait."""
    WIDE: tl.constexpr = tl.int64 if OP == "max" else tl.float32
    total = tl.zeros((BLOCK,), WIDE)
    looks = 0
    missing = 1
    while (missing > 0) & (looks <= num_looks):
        total, absent = _look(page, inside, VALUE, EMPTY, OP, SIZE, BLOCK)
        missing = tl.max(absent, axis=0)
        looks += 1
    if missing > 0:
        for rank in range(SIZE):
            bits = tl.load(page + rank * BLOCK, mask=inside, other=0, volatile=True)
            if (missing_of(bits, EMPTY) > 0) & (num_looks > 0):
                tl.store(error_ptr, rank + 1)
        num_looks *= 0
    return total, num_looks


@jit
def _look(
    page,
    inside,
    VALUE: tl.constexpr,
    EMPTY: tl.constexpr,
    OP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum or maximum of what the pages hold now, and 1 for each value that some page lacks."""
    absent = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        bits = tl.load(page + rank * BLOCK, mask=inside, other=0, volatile=True)
        absent |= (bits == EMPTY).to(tl.int32)
        value = bits if OP == "max" else bits.to(VALUE, bitcast=True).to(tl.float32)
        if OP == "max":
            total = value if rank == 0 else tl.maximum(total, value)
        elif OP == "sum":
            total += value
        elif rank % 2 == 0:
            pair = value
        else:
            pair += value
            if rank % 4 == 1:
                four = pair
            else:
                four += pair
            if rank == SIZE - 1 and SIZE <= 4:
                total = four
            elif rank == 3:
                first_half = four
            elif rank == 7:
                total = first_half + four
    return total, absent


@jit
def _residual_of(residual_ptr, offsets, inside, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    """The residual in float32; it is loaded while values of other ranks are in flight."""
    residual = tl.zeros((BLOCK,), tl.float32)
    if RESIDUAL:
        residual = tl.load(residual_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    return residual


@jit(do_not_specialize=["rank", "numel"])
def _one_shot_kernel(
    x_ptr,  # [numel] the operand; with OP "max" int64
    residual_ptr,  # [numel], read with RESIDUAL
    out_ptr,  # [numel], perhaps the residual
    addresses_ptr,
    state_ptr,
    num_looks_ptr,
    error_ptr,
    rank,
    inbox_bytes,
    numel,
    SIZE: tl.constexpr,
    OP: tl.constexpr,  # "sum", "tree" or "max"
    RESIDUAL: tl.constexpr,
    BITS: tl.constexpr,  # the integer type of a value's bits
    OUT_BITS: tl.constexpr,
    EMPTY: tl.constexpr,
    OUT_EMPTY: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,  # blocks sent before the first wait
    ALIGNED: tl.constexpr,  # numel is a multiple of 16
    PDL: tl.constexpr,
):
    turn, due, old_inbox, extent, num_looks = begin(
        addresses_ptr, state_ptr, num_looks_ptr, rank, inbox_bytes, SIZE, PDL
    )
    cols = tl.arange(0, BLOCK)
    if ALIGNED:
        numel = numel // 16 * 16
    num_blocks = tl.cdiv(numel, BLOCK)
    stride = tl.num_programs(0)
    pages = tl.multiple_of(due[0].to(tl.pointer_type(BITS)), 16)
    offsets = tl.program_id(0) * BLOCK + cols
    x = tl.load(x_ptr + offsets, mask=offsets < numel, other=0)  # loaded together with the program's state
    for block in range(tl.program_id(0), num_blocks + AHEAD * stride, stride):
        if block < num_blocks:
            at = (block * SIZE + rank) * BLOCK + cols
            inside = block * BLOCK + cols < numel
            bits = sendable(x.to(BITS, bitcast=True), EMPTY)
            push(bits, due, at, inside, SIZE)
            offsets = (block + stride) * BLOCK + cols
            x = tl.load(x_ptr + offsets, mask=offsets < numel, other=0)
        if block < stride:
            clear(old_inbox, extent)
        ready = block - AHEAD * stride
        if ready >= 0:
            offsets = ready * BLOCK + cols
            inside = offsets < numel
            residual = _residual_of(residual_ptr, offsets, inside, RESIDUAL, BLOCK)
            total, num_looks = _reduced(
                pages + ready * SIZE * BLOCK + cols, inside, error_ptr, num_looks,
                x_ptr.dtype.element_ty, EMPTY, OP, SIZE, BLOCK,
            )  # fmt: skip
            if RESIDUAL:
                total += residual
            total = total.to(out_ptr.dtype.element_ty)
            total = sendable(total.to(OUT_BITS, bitcast=True), OUT_EMPTY).to(out_ptr.dtype.element_ty, bitcast=True)
            tl.store(out_ptr + offsets, total, mask=inside)
    words = num_blocks * SIZE * BLOCK * (BITS.primitive_bitwidth // 16) // 2
    end(state_ptr, turn, words, num_looks)


@jit(do_not_specialize=["rank", "numel"])
def _two_shot_kernel(
    x_ptr,  # see above
    residual_ptr,
    out_ptr,
    addresses_ptr,
    state_ptr,
    num_looks_ptr,
    error_ptr,
    rank,
    inbox_bytes,
    numel,
    SIZE: tl.constexpr,
    OP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BITS: tl.constexpr,
    OUT_BITS: tl.constexpr,
    EMPTY: tl.constexpr,
    OUT_EMPTY: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rank r owns `share` blocks from r * share. An inbox holds the partials of its own blocks, then all results."""
    turn, due, old_inbox, extent, num_looks = begin(
        addresses_ptr, state_ptr, num_looks_ptr, rank, inbox_bytes, SIZE, PDL
    )
    cols = tl.arange(0, BLOCK)
    if ALIGNED:
        numel = numel // 16 * 16
    share = tl.cdiv(tl.cdiv(numel, BLOCK), SIZE)
    stride = tl.num_programs(0)
    pages = tl.multiple_of(due[0].to(tl.pointer_type(BITS)), 16)
    partial_bytes = share * SIZE * BLOCK * (BITS.primitive_bitwidth // 8)
    results = tl.multiple_of((due[0] + partial_bytes).to(tl.pointer_type(OUT_BITS)), 16)
    for block in range(tl.program_id(0), share + 2 * AHEAD * stride, stride):
        if block < share:
            for k in tl.static_range(SIZE):
                owner = (rank + k) % SIZE
                offsets = (owner * share + block) * BLOCK + cols
                inside = offsets < numel
                bits = tl.load(x_ptr + offsets, mask=inside, other=0).to(BITS, bitcast=True)
                to = tl.multiple_of(due[k].to(tl.pointer_type(BITS)), 16) + (block * SIZE + rank) * BLOCK
                tl.store(to + cols, sendable(bits, EMPTY), mask=inside)
        if block < stride:
            clear(old_inbox, extent)
        ready = block - AHEAD * stride
        if (ready >= 0) & (ready < share):
            offsets = (rank * share + ready) * BLOCK + cols
            inside = offsets < numel
            residual = _residual_of(residual_ptr, offsets, inside, RESIDUAL, BLOCK)
            total, num_looks = _reduced(
                pages + ready * SIZE * BLOCK + cols, inside, error_ptr, num_looks,
                x_ptr.dtype.element_ty, EMPTY, OP, SIZE, BLOCK,
            )  # fmt: skip
            if RESIDUAL:
                total += residual
            total = total.to(out_ptr.dtype.element_ty)
            bits = sendable(total.to(OUT_BITS, bitcast=True), OUT_EMPTY)
            for k in tl.static_range(SIZE):
                to = tl.multiple_of((due[k] + partial_bytes).to(tl.pointer_type(OUT_BITS)), 16)
                tl.store(to + offsets, bits, mask=inside)
        ready -= AHEAD * stride
        if ready >= 0:
            for owner in range(SIZE):
                offsets = (owner * share + ready) * BLOCK + cols
                inside = offsets < numel
                bits, num_looks = arrived(results + offsets, inside, error_ptr, num_looks, owner, OUT_EMPTY)
                tl.store(out_ptr + offsets, bits.to(out_ptr.dtype.element_ty, bitcast=True), mask=inside)
    words = share * SIZE * BLOCK * ((BITS.primitive_bitwidth + OUT_BITS.primitive_bitwidth) // 16) // 2
    end(state_ptr, turn, words, num_looks)


def all_reduce_triton(
    inboxes: Inboxes,
    x: torch.Tensor,  # contiguous
    residual: torch.Tensor | None = None,  # x's shape, contiguous: added to in place and returned
    op: Literal["sum", "tree", "max"] = "sum",  # "tree" is for 2, 4 or 8 ranks; "max" is for int64, in place
) -> torch.Tensor:
    """The sum or the maximum of all ranks' operands, in x's dtype unless it is added to a residual."""
    out = residual if residual is not None else x if op == "max" else torch.empty_like(x)
    size, in_bytes, out_bytes = inboxes.size, x.element_size(), out.element_size()
    is_small = x.nbytes <= SMALL_BYTES
    one_shot = is_small or size == 2 or op == "max"  # two ranks send as much either way
    block = 1024 if is_small else 4096
    room = inboxes.inbox_bytes // (size * in_bytes if one_shot else in_bytes + out_bytes)
    kernel, unit = (_one_shot_kernel, block) if one_shot else (_two_shot_kernel, size * block)
    bits, out_bits = x.view(-1), out.view(-1)
    for piece in pieces_of(x.numel(), room // unit * unit):
        part = bits[piece]
        launch(
            kernel, inboxes, part, out_bits[piece], out_bits[piece], numel=part.numel(),
            OP=op, RESIDUAL=residual is not None, BITS=_BITS[in_bytes], OUT_BITS=_BITS[out_bytes],
            EMPTY=EMPTY_OF[in_bytes], OUT_EMPTY=EMPTY_OF[out_bytes], BLOCK=block, AHEAD=1 if is_small else 2,
            ALIGNED=op != "max" and x.shape[-1] % 16 == 0, num_warps=4 if is_small else 8,
        )  # fmt: skip
    return out
