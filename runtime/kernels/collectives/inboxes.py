"""Inboxes: how the kernels of ranks on GPUs reach each other, by writing into the memory of all others.

A rank pushes its operand into the inboxes of all ranks and reads its own until everything has come: values are their
own flag, so nothing else is signalled and no rank waits for another to begin. An inbox is cleared to EMPTY_WORD; a
value that has its bits is sent as zero. Of three inboxes one is in use, in turn. While rank A is in a launch, B may be
in the next one, as A's values have reached it, but not in the one after that. So a launch may clear the inbox of the
one before it, which is due again two launches later.

Programs keep their turn in device memory, since a graph that is replayed has no other: program i of a rank talks to
programs i of the others alone, and is launched by every operation. While one launch waits for other ranks, those that
follow it may come to the device, too, and wait there: two ranks of one process on one device, which only tests have,
need few programs, or launches that do not overlap. Every wait ends after a number of looks at the inbox and leaves the
number of the rank that was missing, plus one, in a word that the host reads; what is launched then waits no more. The
threads of a program must agree about each wait, as they meet in it: they decide by what all of them have reduced, and
by state that only their own program writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from runtime.kernels.triton_language import INTERPRETED, constexpr, jit, tl, use_pdl

NUM_PROGRAMS = 132  # as many as an H100 or H200 has multiprocessors, which 64 MB take; all ranks need the same number
NUM_INBOXES = 3
STATE_WORDS = 4  # of a program: the inbox that is due, words of the one before to clear, 1 after a failure, unused
EMPTY_WORD = -0x7FFF8000  # 0x80008000: negative zeros of 16 bits, and in 32 bits a denormal number
LOOKS_PER_S = 1 << (10 if INTERPRETED else 20)  # at an inbox; each takes about a microsecond
SMALL_BYTES = 256 << 10  # of an operand; larger ones are bound by bandwidth


class Inboxes(NamedTuple):
    """A rank's view of its group's memory."""

    rank: int
    size: int
    inbox_bytes: int
    addresses: torch.Tensor  # [size] int64: where each rank's inboxes begin
    state: torch.Tensor  # [num_programs, STATE_WORDS] int32, this rank's
    num_looks: torch.Tensor  # [1] int32: after so many a wait fails
    error: torch.Tensor  # [1] int32 that the host can read; the rank that was missing, plus one


EMPTY_OF = {2: -0x8000, 4: EMPTY_WORD, 8: -0x7FFF7FFF7FFF8000}  # by bytes of a value
_WORD = constexpr(EMPTY_WORD)
_TURNS = constexpr(NUM_INBOXES)
_STATE = constexpr(STATE_WORDS)
_CLEARED = constexpr(1024)  # words at once


@jit
def begin(addresses_ptr, state_ptr, num_looks_ptr, rank, inbox_bytes, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Which inbox is due, and its address in all ranks' memory, from this rank on; the address of
    this rank's inbox before and its words to clear; the looks that a wait may take."""
    bases = ()
    for k in tl.static_range(SIZE):  # before the wait: no kernel writes them
        bases = bases + (tl.load(addresses_ptr + (rank + k) % SIZE),)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    state = state_ptr + tl.program_id(0) * _STATE
    turn = tl.load(state)
    extent = tl.load(state + 1)
    # A program reads only what it has written itself, so that its threads agree about it: they must not part ways.
    num_looks = tl.load(num_looks_ptr) * (1 - tl.load(state + 2))
    due = ()
    for k in tl.static_range(SIZE):
        due = due + (bases[k] + turn * inbox_bytes,)  # type: ignore[assignment]  # noqa: RUF005
    old = bases[0] + (turn + _TURNS - 1) % _TURNS * inbox_bytes  # type: ignore[misc]
    return turn, due, old, extent, num_looks


@jit
def clear(inbox, extent):
    """Make an inbox of this rank empty again; the programs share its words."""
    words = tl.multiple_of(inbox.to(tl.pointer_type(tl.int32)), 16)
    offsets = tl.arange(0, _CLEARED)
    extent = extent // 16 * 16  # as it is; the compiler may store several words at once
    for start in range(tl.program_id(0) * _CLEARED, extent, tl.num_programs(0) * _CLEARED):
        tl.store(words + start + offsets, tl.full((_CLEARED,), _WORD, tl.int32), mask=start + offsets < extent)


@jit
def end(state_ptr, turn, extent, num_looks):
    tl.debug_barrier()  # all threads have read the state
    state = state_ptr + tl.program_id(0) * _STATE
    tl.store(state, (turn + 1) % _TURNS)
    tl.store(state + 1, extent)
    tl.store(state + 2, (num_looks == 0).to(tl.int32))


@jit
def sendable(bits, EMPTY: tl.constexpr):
    """The values' bits, none of them EMPTY; one beside it where those of zero would be another number."""
    return tl.where(bits == EMPTY, EMPTY + 1 if bits.dtype == tl.int64 else 0, bits)


@jit
def push(bits, due, offsets, inside, SIZE: tl.constexpr):
    """Store to the same place in all ranks' inboxes, each rank beginning with another one."""
    for k in tl.static_range(SIZE):
        to = tl.multiple_of(due[k].to(tl.pointer_type(bits.dtype)), 16)
        tl.store(to + offsets, bits, mask=inside)


@jit
def missing_of(bits, EMPTY: tl.constexpr):
    """1 if some of the values have not come; the same in all threads."""
    return tl.max((bits == EMPTY).to(tl.int32), axis=0)


@jit
def arrived(page, inside, error_ptr, num_looks, owner, EMPTY: tl.constexpr):
    """A page of one rank, as soon as it has come, and the looks that the next wait may take."""
    bits = tl.load(page, mask=inside, other=0, volatile=True)
    missing = missing_of(bits, EMPTY)
    looks = 0
    while (missing > 0) & (looks < num_looks):
        bits = tl.load(page, mask=inside, other=0, volatile=True)
        missing = missing_of(bits, EMPTY)
        looks += 1
    if missing > 0:
        if num_looks > 0:
            tl.store(error_ptr, owner + 1)
        num_looks *= 0
    return bits, num_looks


def pieces_of(num: int, most: int) -> Iterator[slice]:
    return (slice(start, min(start + most, num)) for start in range(0, num, most))


def launch(kernel: Any, inboxes: Inboxes, *tensors: torch.Tensor, **options: Any) -> None:
    pdl = use_pdl(tensors[0])
    kernel[(len(inboxes.state),)](
        *tensors, inboxes.addresses, inboxes.state, inboxes.num_looks, inboxes.error, inboxes.rank, inboxes.inbox_bytes,
        SIZE=inboxes.size, PDL=pdl, launch_pdl=pdl, **options,
    )  # fmt: skip
