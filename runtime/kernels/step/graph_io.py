"""Input and output for a decode step's graph, which reads and writes host memory.

Copies before and after a graph cost the host 0.15 ms a step, and the device two pauses. A graph's kernels always read
the same addresses. The host therefore writes inputs into a ring's entries, and graphs count entries on the device:

    input   = [ repeats | num_writes | rows: 2 * (2 * size + num_samples) | the writes, as scatter_writes.py ]
    rows    = [ slots: size | tokens: size | slots of the samples: num_samples, and as many again that move on:
                starts: size | nothing: size | positions of the samples: num_samples ]
    output  = [ token ids of the first replay: num_samples | of the second, if there are repeats | ... ]
    control = [ entry of the next input | replays done of it | its repeats ]

An input with `repeats` serves that many replays; each replay's rows are one token further.
"""

from __future__ import annotations

import torch

from runtime.kernels.step.scatter_writes import apply_writes, scatter_writes_torch
from runtime.kernels.triton_language import jit, next_power_of_2, tl, use_pdl

HEAD = 2  # ints before an input's rows
_BLOCK = 1024
_NUM_PROGRAMS = 8


def read_input_torch(
    input_ring: torch.Tensor,  # [num_entries, entry_size] int32, host memory that the device reads
    control: torch.Tensor,  # [3] int32
    rows: torch.Tensor,  # [n] int32, the graph's
    state: torch.Tensor,  # [size] int32, the requests' state as one line
) -> None:
    """Before the first replay of an input, copy its rows to `rows` and apply its writes to `state`."""
    at, replays_done, _ = control.tolist()
    if replays_done:
        return
    entry = input_ring[at]
    control[2] = entry[0]
    rows.copy_(entry[HEAD : HEAD + len(rows)])
    scatter_writes_torch(state, torch.cat((entry[1:2], entry[HEAD + len(rows) :])))


def write_output_torch(
    token_ids: torch.Tensor,  # [num_samples] int32
    control: torch.Tensor,  # [3] int32
    rows: torch.Tensor,  # [2 * (2 * size + num_samples)] int32
    output_ring: torch.Tensor,  # [num_entries, output_size] int32, host memory that the device writes
) -> None:
    """Append the samples to those of earlier replays, and advance rows and counts for the next replay."""
    entry, replays_done, repeats = control.tolist()
    n = len(token_ids)
    output_ring[entry, replays_done * n : (replays_done + 1) * n] = token_ids
    rows[len(rows) // 2 :] += 1
    is_last = replays_done + 1 >= repeats
    control[0], control[1] = ((entry + 1) % len(output_ring), 0) if is_last else (entry, replays_done + 1)


@jit(do_not_specialize=["num_ints"], do_not_specialize_on_alignment=["rows_ptr"])
def _read_input_kernel(
    input_ring_ptr,  # [num_entries, entry_size]
    control_ptr,  # [3]
    rows_ptr,  # [num_ints]
    state_ptr,  # [size]
    entry_size,
    num_ints,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.load(control_ptr)
    if tl.load(control_ptr + 1) == 0:
        input_ptr = input_ring_ptr + entry * entry_size
        program, lanes = tl.program_id(0), tl.arange(0, BLOCK)
        num_writes = tl.load(input_ptr + 1)
        for at in range(program * BLOCK, num_ints, tl.num_programs(0) * BLOCK):
            inside = at + lanes < num_ints
            tl.store(rows_ptr + at + lanes, tl.load(input_ptr + HEAD + at + lanes, mask=inside), mask=inside)
        if program == 0:
            tl.store(control_ptr + 2, tl.load(input_ptr))
        apply_writes(state_ptr, input_ptr + HEAD + num_ints, num_writes, BLOCK)


@jit(do_not_specialize=["n", "num_ints"], do_not_specialize_on_alignment=["rows_ptr", "token_ids_ptr"])
def _write_output_kernel(
    token_ids_ptr,  # [n]
    control_ptr,  # [3]
    rows_ptr,  # [num_ints]
    output_ring_ptr,  # [num_entries, output_size]
    num_entries,
    output_size,
    n,
    num_ints,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    entry = tl.load(control_ptr)
    replays_done = tl.load(control_ptr + 1)
    repeats = tl.load(control_ptr + 2)
    lanes = tl.arange(0, BLOCK)
    output_ptr = output_ring_ptr + entry * output_size + replays_done * n
    for at in range(0, n, BLOCK):
        token_ids = tl.load(token_ids_ptr + at + lanes, mask=at + lanes < n)
        tl.store(output_ptr + at + lanes, token_ids, mask=at + lanes < n)
    half = num_ints // 2
    for at in range(half, num_ints, BLOCK):
        inside = at + lanes < num_ints
        tl.store(rows_ptr + at + lanes, tl.load(rows_ptr + at + lanes, mask=inside) + 1, mask=inside)
    is_last = replays_done + 1 >= repeats
    tl.store(control_ptr, (entry + is_last.to(tl.int32)) % num_entries)
    tl.store(control_ptr + 1, tl.where(is_last, 0, replays_done + 1))


def read_input(input_ring: torch.Tensor, control: torch.Tensor, rows: torch.Tensor, state: torch.Tensor) -> None:
    """`read_input_torch` as one kernel."""
    _read_input_kernel[(_NUM_PROGRAMS,)](
        input_ring, control, rows, state, input_ring.shape[1], len(rows), HEAD=HEAD, BLOCK=_BLOCK, num_warps=4
    )


def write_output(token_ids: torch.Tensor, control: torch.Tensor, rows: torch.Tensor, output_ring: torch.Tensor) -> None:
    """`write_output_torch` as one kernel of one program."""
    num_entries, output_size = output_ring.shape
    n, num_ints, pdl = len(token_ids), len(rows), use_pdl(token_ids)
    block = min(_BLOCK, max(32, next_power_of_2(num_ints // 2)))
    _write_output_kernel[(1,)](
        token_ids, control, rows, output_ring, num_entries, output_size, n, num_ints,
        BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
