"""Copies between slots and host memory at any addresses, all in one kernel.

The copy engine costs the host several microseconds a slot, and a step may copy hundreds of small ones. Few programs
copy, so that other kernels keep most multiprocessors. Each has enough words in flight for the bus."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from runtime.kernels.triton_language import jit, tl

_NUM_PROGRAMS = 16
_BLOCK = 4096  # words that a program has in flight


def copy_slots_torch(
    slots: torch.Tensor,  # [n, slot_words] int64
    addresses: torch.Tensor,  # [n] int64, each slot's host memory, a multiple of 16
    size: int,  # words that are copied
    to_host: bool,
) -> None:
    """Copy slots to host memory, or host memory to slots, on a CPU."""
    for slot, address in zip(slots.numpy(), addresses.tolist(), strict=True):
        host = np.ctypeslib.as_array((ctypes.c_int64 * size).from_address(address))
        np.copyto(*((host, slot[:size]) if to_host else (slot[:size], host)))


@jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["addresses_ptr"])
def _copy_slots_kernel(
    slots_ptr,
    addresses_ptr,
    num_slots,
    size,
    slot_words,
    BLOCK: tl.constexpr,
    TO_HOST: tl.constexpr,
):
    blocks = tl.cdiv(size, BLOCK)
    for block in range(tl.program_id(0), num_slots * blocks, tl.num_programs(0)):
        item = block // blocks
        at = block % blocks * BLOCK + tl.arange(0, BLOCK)
        host = tl.multiple_of(tl.load(addresses_ptr + item).to(tl.pointer_type(tl.int64)), 16) + at
        slot = slots_ptr + item.to(tl.int64) * slot_words + at
        if TO_HOST:
            tl.store(host, tl.load(slot, mask=at < size), mask=at < size)
        else:
            tl.store(slot, tl.load(host, mask=at < size), mask=at < size)


def copy_slots_triton(slots: torch.Tensor, addresses: torch.Tensor, size: int, to_host: bool) -> None:
    """`copy_slots_torch` as one kernel. The device can use the host memory's addresses, as pinned memory permits."""
    programs = min(_NUM_PROGRAMS, len(slots) * -(-size // _BLOCK))
    _copy_slots_kernel[(programs,)](
        slots, addresses, len(slots), size, slots.stride(0), BLOCK=_BLOCK, TO_HOST=to_host, num_warps=8
    )
