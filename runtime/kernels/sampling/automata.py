"""Token automata on a device: each slot's state gives its output's masks, and advances by sampled tokens.

All automata share one int32 pool. A slot's place has the offsets of its automaton, which has S states:

    masks [S, num_words] | class of each token [vocab] | next state [S, num_classes], -1: not allowed

In state -1 all tokens are allowed: the output has left its automaton, and its samples do not count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.sampling.bitmask import apply_bitmask_torch
from runtime.kernels.triton_language import ROW_ARRAYS, jit, tl, use_pdl

# Columns in a place, int32: the three parts' offsets in the pool, and the number of classes.
MASKS, CLASSES, NEXT, NUM_CLASSES = range(4)
# Columns in a step's row, int32: its slot, its first sample in the step and in the logits, and its guesses.
SLOT, FIRST, AT, NUM_GUESSES, GUESSES = range(5)

_TILE = 2048  # tokens per program


def _next_torch(state: int, token: int, place: list[int], pool: torch.Tensor) -> int:
    if state < 0 or token < 0:
        return -1
    token_class = int(pool[place[CLASSES] + token])
    return int(pool[place[NEXT] + state * place[NUM_CLASSES] + token_class])


def mask_states_torch(
    logits: torch.Tensor,  # [m, vocab] float32, changed in place: -inf where a token is not allowed
    rows: torch.Tensor,  # [n, GUESSES + most guesses] int32
    places: torch.Tensor,  # [num_slots, 4] int32
    states: torch.Tensor,  # [num_slots] int32
    pool: torch.Tensor,  # int32
) -> None:
    """Mask one logits row for a row's state, and one for the state after each of its guesses."""
    num_words = -(-logits.shape[1] // 32)
    for slot, _, at, num_guesses, *guesses in rows.tolist():
        state, place = int(states[slot]), places[slot].tolist()
        for i, guess in enumerate([*guesses[:num_guesses], -1]):
            if state >= 0:
                words = pool[place[MASKS] + state * num_words :][:num_words]
                apply_bitmask_torch(
                    logits, torch.tensor([at + i], dtype=torch.int32, device=logits.device), words[None]
                )
            state = _next_torch(state, guess, place, pool)


def advance_states_torch(
    token_ids: torch.Tensor,  # [num_samples] int32, the step's
    rows: torch.Tensor,
    places: torch.Tensor,
    states: torch.Tensor,  # changed in place
    pool: torch.Tensor,
) -> None:
    """Advance states by the accepted samples: up to the first that does not equal its guess."""
    for slot, first, _, num_guesses, *guesses in rows.tolist():
        state = int(states[slot])
        for i, guess in enumerate([*guesses[:num_guesses], -1]):
            token = int(token_ids[first + i])
            state = _next_torch(state, token, places[slot].tolist(), pool)
            if token != guess:
                break
        states[slot] = state


class AutomataForm(NamedTuple):
    """Constants of both kernels."""

    pdl: bool
    slot: int = SLOT
    at: int = AT
    num_guesses: int = NUM_GUESSES
    guesses: int = GUESSES
    masks: int = MASKS
    classes: int = CLASSES
    next: int = NEXT
    num_classes: int = NUM_CLASSES
    tile: int = _TILE
    first: int = FIRST


@jit
def _next(state, token, place_ptr, pool_ptr, FORM: tl.constexpr):
    is_on = (state >= 0) & (token >= 0)
    token_class = tl.load(pool_ptr + tl.load(place_ptr + FORM.classes) + token, mask=is_on, other=0)
    at = tl.load(place_ptr + FORM.next) + state * tl.load(place_ptr + FORM.num_classes) + token_class
    return tl.load(pool_ptr + at, mask=is_on, other=-1)


@jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def _mask_states_kernel(
    logits_ptr,  # [m, vocab] fp32, rows logits_stride apart
    rows_ptr,  # [n, row_size]
    places_ptr,  # [num_slots, 4]
    states_ptr,  # [num_slots]
    pool_ptr,
    vocab,
    num_words,
    logits_stride,
    row_size,
    FORM: tl.constexpr,  # `AutomataForm`
):
    """Program (i, j, k): logits tile i after row j's k-th guess."""
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row_ptr = rows_ptr + tl.program_id(1) * row_size
    num_before = tl.program_id(2)
    slot = tl.load(row_ptr + FORM.slot)
    place_ptr = places_ptr + slot * 4
    state = tl.load(states_ptr + slot)
    for i in range(num_before):
        state = _next(state, tl.load(row_ptr + FORM.guesses + i), place_ptr, pool_ptr, FORM)
    if (state >= 0) & (num_before <= tl.load(row_ptr + FORM.num_guesses)):
        ids = tl.program_id(0) * FORM.tile + tl.arange(0, FORM.tile)
        words_ptr = pool_ptr + tl.load(place_ptr + FORM.masks) + state * num_words
        words = tl.load(words_ptr + ids // 32, mask=ids < vocab, other=-1)
        logits_ptr += (tl.load(row_ptr + FORM.at) + num_before).to(tl.int64) * logits_stride
        tl.store(logits_ptr + ids, -float("inf"), mask=((words >> (ids % 32)) & 1) == 0)


@jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def _advance_states_kernel(
    token_ids_ptr,  # [num_samples]
    rows_ptr,  # [n, row_size]
    places_ptr,  # [num_slots, 4]
    states_ptr,  # [num_slots]
    pool_ptr,
    row_size,
    FORM: tl.constexpr,  # `AutomataForm`
):
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row_ptr = rows_ptr + tl.program_id(0) * row_size
    slot, num_guesses = tl.load(row_ptr + FORM.slot), tl.load(row_ptr + FORM.num_guesses)
    tokens_ptr = token_ids_ptr + tl.load(row_ptr + FORM.first)
    state = tl.load(states_ptr + slot)
    counts = num_guesses >= 0
    for i in range(num_guesses + 1):
        token = tl.load(tokens_ptr + i)
        after = _next(state, token, places_ptr + slot * 4, pool_ptr, FORM)
        state = tl.where(counts, after, state)
        counts = counts & (token == tl.load(row_ptr + FORM.guesses + i, mask=i < num_guesses, other=-1))
    tl.store(states_ptr + slot, state)


def mask_states_triton(
    logits: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, states: torch.Tensor, pool: torch.Tensor
) -> None:
    """`mask_states_torch` as one kernel."""
    vocab, (num_rows, row_size), pdl = logits.shape[1], rows.shape, use_pdl(logits)
    _mask_states_kernel[(-(-vocab // _TILE), num_rows, row_size - GUESSES + 1)](
        logits, rows, places, states, pool, vocab, -(-vocab // 32), logits.stride(0), row_size,
        AutomataForm(pdl), num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def advance_states_triton(
    token_ids: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, states: torch.Tensor, pool: torch.Tensor
) -> None:
    """`advance_states_torch` as one kernel."""
    pdl = use_pdl(token_ids)
    _advance_states_kernel[(len(rows),)](
        token_ids, rows, places, states, pool, rows.shape[1],
        AutomataForm(pdl), num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
