"""Inboxes: the protocol between the kernels of GPU ranks, which write into each other's memory.

A rank pushes its operand into all ranks' inboxes and polls its own inbox until all values are there. A value is
its own flag: ranks send nothing else, and do not wait for one another to begin. A cleared inbox holds EMPTY_WORD; a
value with these bits is sent as zero. Three inboxes take turns. While rank A is in a launch, rank B may be in the next
launch, because A's values have reached it. B cannot be in the launch after that. A launch may therefore clear the
previous inbox, which is used again two launches later.

- **Turns.** Each program keeps its turn in device memory, because a replayed graph has no other state. Program i
  exchanges data only with other ranks' programs i, and every operation launches it.
- **Overlap.** While a launch waits for other ranks, later launches may start and wait, too. Two ranks on one device,
  which only tests have, need few programs, or launches that do not overlap.
- **Limits.** A wait ends after a number of polls. It then stores the missing rank, plus one, in a word for the host,
  and later launches do not wait.
- **Agreement.** A program's threads take the same branch at a wait: they decide by reduced values, and by state
  that only their own program writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from runtime.kernels.triton_language import INTERPRETED, constexpr, jit, tl, use_pdl

NUM_PROGRAMS = 132  # multiprocessors on an H100 or H200, enough for 64 MB; the same on all ranks
NUM_INBOXES = 3
STATE_WORDS = 4  # a program's state: next inbox, words in the previous one to clear, 1 after a failure, unused
EMPTY_WORD = -0x7FFF8000  # 0x80008000: 16-bit negative zeros, and in 32 bits a denormal number
LOOKS_PER_S = 1 << (10 if INTERPRETED else 20)  # polls of an inbox; each takes about a microsecond
SMALL_BYTES = 256 << 10  # operand size; bandwidth bounds larger ones


class Inboxes(NamedTuple):
    """A rank's view of its group's memory."""

    rank: int
    size: int
    inbox_bytes: int
    addresses: torch.Tensor  # [size] int64: where each rank's inboxes begin
    state: torch.Tensor  # [num_programs, STATE_WORDS] int32, this rank's
    num_looks: torch.Tensor  # [1] int32: polls after which a wait fails
    error: torch.Tensor  # [1] int32 that the host can read: the missing rank, plus one


EMPTY_OF = {2: -0x8000, 4: EMPTY_WORD, 8: -0x7FFF7FFF7FFF8000}  # key: bytes per value
_WORD = constexpr(EMPTY_WORD)
_TURNS = constexpr(NUM_INBOXES)
_STATE = constexpr(STATE_WORDS)
_CLEARED = constexpr(1024)  # words at once


@jit
def begin(addresses_ptr, state_ptr, num_looks_ptr, rank, inbox_bytes, SIZE: tl.constexpr, PDL: tl.constexpr):
    """Start a turn. Returns its number, all ranks' inbox addresses from this rank on, and a wait's polls.

    Between these it returns this rank's previous inbox and the words to clear in it."""
    bases = ()
    for k in tl.static_range(SIZE):  # loaded before the wait: no kernel writes them
        bases = bases + (tl.load(addresses_ptr + (rank + k) % SIZE),)  # type: ignore[assignment]  # noqa: RUF005
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    state = state_ptr + tl.program_id(0) * _STATE
    turn = tl.load(state)
    extent = tl.load(state + 1)
    # A program reads only its own writes here, so that its threads take the same branches.
    num_looks = tl.load(num_looks_ptr) * (1 - tl.load(state + 2))
    due = ()
    for k in tl.static_range(SIZE):
        due = due + (bases[k] + turn * inbox_bytes,)  # type: ignore[assignment]  # noqa: RUF005
    old = bases[0] + (turn + _TURNS - 1) % _TURNS * inbox_bytes  # type: ignore[misc]
    return turn, due, old, extent, num_looks


@jit
def clear(inbox, extent):
    """Clear an inbox of this rank; the programs share its words."""
    words = tl.multiple_of(inbox.to(tl.pointer_type(tl.int32)), 16)
    offsets = tl.arange(0, _CLEARED)
    extent = extent // 16 * 16  # no change; the compiler learns that it may store several words at once
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
    """The bits of values with EMPTY replaced: by zero, or for int64, where zero is another value, by EMPTY + 1."""
    return tl.where(bits == EMPTY, EMPTY + 1 if bits.dtype == tl.int64 else 0, bits)


@jit
def push(bits, due, offsets, inside, SIZE: tl.constexpr):
    """Store to the same place in all inboxes; each rank starts with another inbox."""
    for k in tl.static_range(SIZE):
        to = tl.multiple_of(due[k].to(tl.pointer_type(bits.dtype)), 16)
        tl.store(to + offsets, bits, mask=inside)


@jit
def missing_of(bits, EMPTY: tl.constexpr):
    """1 if a value is missing; the same in all threads."""
    return tl.max((bits == EMPTY).to(tl.int32), axis=0)


@jit
def arrived(page, inside, error_ptr, num_looks, owner, EMPTY: tl.constexpr):
    """Wait for a page of one rank; return it and the polls left for the next wait."""
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
