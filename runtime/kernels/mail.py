"""The two ends of a decode step's graph: it takes its rows from memory of the host, and leaves its samples there.

A copy before a graph and another after it cost the host 0.15 ms a step, and the device a pause at each. A graph's
kernels always read the same addresses, so the host writes letters into the pages of a ring, in turn, and the graphs
count along on the device:

    letter  = [ repeats | num_runs | rows: 2 * (2 * size + num_samples) | runs and their values, as kernels/staging.py ]
    rows    = [ slots: size | tokens: size | slots of the samples: num_samples, and as many again that move on:
                starts: size | nothing: size | positions of the samples: num_samples ]
    answer  = [ token ids of the first replay: num_samples | of the second, if there are repeats | ... ]
    control = [ page of the next letter | replays done of it | its repeats ]

A letter with `repeats` is for as many replays, the rows of each a token further than before.
"""

from __future__ import annotations

import torch

from runtime.kernels._triton import jit, next_power_of_2, tl, use_pdl
from runtime.kernels.staging import apply_runs_torch, write_runs

HEAD = 2  # ints of a letter before its rows
_BLOCK = 1024
_NUM_PROGRAMS = 8


def take_letter_torch(
    letters: torch.Tensor,  # [num_pages, page_size] int32, memory of the host that the device reads
    control: torch.Tensor,  # [3] int32
    rows: torch.Tensor,  # [n] int32, of the graph
    state: torch.Tensor,  # [size] int32, the requests' state as one line
) -> None:
    """Before the first replay of a letter, copy its rows to `rows` and apply its runs to `state`."""
    page, replays_done, _ = control.tolist()
    if replays_done:
        return
    letter = letters[page]
    control[2] = letter[0]
    rows.copy_(letter[HEAD : HEAD + len(rows)])
    apply_runs_torch(state, torch.cat((letter[1:2], letter[HEAD + len(rows) :])))


def leave_answer_torch(
    token_ids: torch.Tensor,  # [num_samples] int32
    control: torch.Tensor,  # [3] int32
    rows: torch.Tensor,  # [2 * (2 * size + num_samples)] int32
    answers: torch.Tensor,  # [num_pages, answer_size] int32, memory of the host that the device writes
) -> None:
    """Copy the samples behind those of the replays before, and make rows and counts ready for the next replay."""
    page, replays_done, repeats = control.tolist()
    n = len(token_ids)
    answers[page, replays_done * n : (replays_done + 1) * n] = token_ids
    rows[len(rows) // 2 :] += 1
    is_last = replays_done + 1 >= repeats
    control[0], control[1] = ((page + 1) % len(answers), 0) if is_last else (page, replays_done + 1)


@jit(do_not_specialize_on_alignment=["rows_ptr"])
def _take_letter_kernel(
    letters_ptr,  # [num_pages, page_size]
    control_ptr,  # [3]
    rows_ptr,  # [num_ints]
    state_ptr,  # [size]
    page_size,
    num_ints,
    HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    page = tl.load(control_ptr)
    if tl.load(control_ptr + 1) == 0:
        letter_ptr = letters_ptr + page * page_size
        program, lanes = tl.program_id(0), tl.arange(0, BLOCK)
        num_runs = tl.load(letter_ptr + 1)
        for at in range(program * BLOCK, num_ints, tl.num_programs(0) * BLOCK):
            inside = at + lanes < num_ints
            tl.store(rows_ptr + at + lanes, tl.load(letter_ptr + HEAD + at + lanes, mask=inside), mask=inside)
        if program == 0:
            tl.store(control_ptr + 2, tl.load(letter_ptr))
        write_runs(state_ptr, letter_ptr + HEAD + num_ints, num_runs, BLOCK)


@jit(do_not_specialize_on_alignment=["rows_ptr", "token_ids_ptr"])
def _leave_answer_kernel(
    token_ids_ptr,  # [n]
    control_ptr,  # [3]
    rows_ptr,  # [num_ints]
    answers_ptr,  # [num_pages, answer_size]
    num_pages,
    answer_size,
    n,
    num_ints,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    page = tl.load(control_ptr)
    replays_done = tl.load(control_ptr + 1)
    repeats = tl.load(control_ptr + 2)
    lanes = tl.arange(0, BLOCK)
    answer_ptr = answers_ptr + page * answer_size + replays_done * n
    for at in range(0, n, BLOCK):
        token_ids = tl.load(token_ids_ptr + at + lanes, mask=at + lanes < n)
        tl.store(answer_ptr + at + lanes, token_ids, mask=at + lanes < n)
    half = num_ints // 2
    for at in range(half, num_ints, BLOCK):
        inside = at + lanes < num_ints
        tl.store(rows_ptr + at + lanes, tl.load(rows_ptr + at + lanes, mask=inside) + 1, mask=inside)
    is_last = replays_done + 1 >= repeats
    tl.store(control_ptr, (page + is_last.to(tl.int32)) % num_pages)
    tl.store(control_ptr + 1, tl.where(is_last, 0, replays_done + 1))


def take_letter(letters: torch.Tensor, control: torch.Tensor, rows: torch.Tensor, state: torch.Tensor) -> None:
    """`take_letter_torch` as one kernel."""
    _take_letter_kernel[(_NUM_PROGRAMS,)](
        letters, control, rows, state, letters.shape[1], len(rows), HEAD=HEAD, BLOCK=_BLOCK, num_warps=4
    )


def leave_answer(token_ids: torch.Tensor, control: torch.Tensor, rows: torch.Tensor, answers: torch.Tensor) -> None:
    """`leave_answer_torch` as one kernel of one program."""
    num_pages, answer_size = answers.shape
    n, num_ints, pdl = len(token_ids), len(rows), use_pdl(token_ids)
    block = min(_BLOCK, max(32, next_power_of_2(num_ints // 2)))
    _leave_answer_kernel[(1,)](
        token_ids, control, rows, answers, num_pages, answer_size, n, num_ints,
        BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
