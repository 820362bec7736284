"""The choices of a step's tokens in tiles for one expert each, made on the device.

A step can be a CUDA graph, so a launch must not depend on how many tokens chose an expert. A launch makes the
tiles, and one product covers all experts with a grid for the most tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.triton_language import constexpr, jit, next_power_of_2, tl, use_pdl

_TALL = 32  # least choices in a tile with its columns' programs one after another
_ROUND = 1024  # choices that a program compares at once
_SHORT_ROUND = 128  # the same for a one-warp program
_COUNTED = 4 * _ROUND  # choices that a program counts; more are counted by several programs, in rows
_MOST_PARTS = 8  # programs that place one expert's choices
_ROWS_AT_ONCE = constexpr(8)


class Tile(NamedTuple):
    """How a product over all experts is cut, and its launch options."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def columns_first(self) -> bool:
        """True if a choice tile's programs follow one another. Large tiles are then read from memory once."""
        return self.block_m >= _TALL

    def grid(self, num_tiles: int, num_columns: int) -> tuple[int, int]:
        """The grid for choice tiles and columns (`tile_and_columns`)."""
        grid = num_tiles, -(-num_columns // self.block_n)
        return grid[::-1] if self.columns_first else grid


class ExpertTiles(NamedTuple):
    """The choices of a step, in tiles for one expert each. A choice is token * choices of a token + its place."""

    experts: torch.Tensor  # int32 [num_tiles]; -1 for a tile without choices
    # int32 [num_tiles, block_m]: choices by token, then -1. None if tile i has choice i alone; so is `done`.
    choices: torch.Tensor | None = None
    done: torch.Tensor | None = None  # int32 [num_tiles]: zeros, to count a tile's finished programs


def tiled(ids: torch.Tensor, num_experts: int, block_m: int) -> ExpertTiles:
    """The choices `ids` in tiles with `block_m` places, as many tiles as the worst case needs."""
    pdl, num_choices = use_pdl(ids), len(ids)
    experts = ids.new_empty(worst_case_tiles(num_choices, num_experts, block_m))
    choices, done = ids.new_empty(len(experts), block_m), torch.empty_like(experts)
    block, warps = _round(max(num_choices, block_m))
    bins, num_rows, counts = next_power_of_2(num_experts + 1), -(-num_choices // _COUNTED), ids
    if num_rows > 1:
        counts = ids.new_empty(num_rows, bins)
        _count_choices_kernel[(num_rows,)](
            ids, counts, num_choices,
            BINS=bins, COUNTED=_COUNTED, BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl,
        )  # fmt: skip
    rows_of_a_part = -(-num_rows // _MOST_PARTS)
    _tile_choices_kernel[(num_experts, -(-num_rows // rows_of_a_part))](
        ids, counts, experts, choices, done, num_choices, len(experts), rows_of_a_part, BINS=bins, BLOCK_M=block_m,
        COUNTED=_COUNTED if num_rows > 1 else 0, BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return ExpertTiles(experts, choices, done)


def _round(num_choices: int) -> tuple[int, int]:
    """Choices that a program compares at once, and its warps. An empty place takes the time of a choice."""
    block = max(_SHORT_ROUND, min(_ROUND, next_power_of_2(num_choices)))
    return block, 1 if block == _SHORT_ROUND else 4


def worst_case_tiles(num_choices: int, num_experts: int, block_m: int) -> int:
    """The most tiles that a number of choices can need, however they are spread over the experts."""
    return (num_choices + min(num_experts, num_choices) * (block_m - 1)) // block_m


@jit(do_not_specialize=["num_choices"])
def _count_choices_kernel(
    ids_ptr,  # [num_choices] int32
    counts_ptr,  # [num_rows, BINS] int32
    num_choices,
    BINS: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program i: how often each expert is chosen among COUNTED choices, in row i."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin = tl.program_id(0) * COUNTED
    counts = _counts(ids_ptr, begin, tl.minimum(begin + COUNTED, num_choices), BINS, BLOCK)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)


@jit
def _counts(ids_ptr, begin, end, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """How often each expert is chosen among some choices, [BINS]."""
    counts, lanes = tl.zeros([BINS], tl.int32), tl.arange(0, BLOCK)
    for at in range(begin, end, BLOCK):
        counts += tl.histogram(tl.load(ids_ptr + at + lanes, mask=at + lanes < end, other=BINS - 1), BINS)
    return counts


@jit(do_not_specialize=["num_choices", "num_tiles", "rows_of_a_part"])
def _tile_choices_kernel(
    ids_ptr,  # [num_choices] int32
    counts_ptr,  # [num_rows, BINS] int32, with COUNTED
    experts_ptr,  # this and the next two as in `ExpertTiles`
    choices_ptr,
    done_ptr,
    num_choices,
    num_tiles,
    rows_of_a_part,
    BINS: tl.constexpr,  # a power of two, more than the experts
    BLOCK_M: tl.constexpr,
    COUNTED: tl.constexpr,  # choices in a row of counts; 0 without rows
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (e, i): expert e's tiles, in expert order, with choices from part i. The last expert adds tiles without
    choices.

    Those come last, because a program without work delays others."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, lanes, bins = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, BINS)
    first_row = tl.program_id(1) * rows_of_a_part
    if COUNTED:
        counts, earlier = _added_counts(counts_ptr, tl.cdiv(num_choices, COUNTED), first_row, BINS)
    else:
        counts = _counts(ids_ptr, 0, num_choices, BINS, BLOCK)
        earlier = tl.zeros([BINS], tl.int32)
    tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    count = tl.sum(tl.where(bins == expert, counts, 0), axis=0)
    used = (count + BLOCK_M - 1) // BLOCK_M
    place = first * BLOCK_M
    if tl.program_id(1) == 0:
        size = used
        if expert == tl.num_programs(0) - 1:
            size = num_tiles - first
        for at in range(0, size, BLOCK):
            tile = at + lanes
            tl.store(experts_ptr + first + tile, tl.where(tile < used, expert, -1), mask=tile < size)
            tl.store(done_ptr + first + tile, 0, mask=tile < size)
        tl.store(choices_ptr + place + count + lanes, -1, mask=count + lanes < used * BLOCK_M)
    place += tl.sum(tl.where(bins == expert, earlier, 0), axis=0)
    begin, end = first_row * COUNTED, num_choices
    if COUNTED:
        end = tl.minimum(begin + rows_of_a_part * COUNTED, num_choices)
    for at in range(begin, end, BLOCK):
        ids = tl.load(ids_ptr + at + lanes, mask=at + lanes < end, other=-1)
        mine = (ids == expert).to(tl.int32)
        tl.store(choices_ptr + place + tl.cumsum(mine, axis=0) - 1, at + lanes, mask=mine == 1)
        place += tl.sum(mine, axis=0)


@jit
def _added_counts(counts_ptr, num_rows, first_row, BINS: tl.constexpr):
    """How often each expert is chosen in all rows, and in those before `first_row`, both [BINS]."""
    rows, bins = tl.arange(0, _ROWS_AT_ONCE)[:, None], tl.arange(0, BINS)[None, :]
    counts, earlier = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    for at in range(0, num_rows, _ROWS_AT_ONCE):
        some = tl.load(counts_ptr + (at + rows) * BINS + bins, mask=at + rows < num_rows, other=0)
        counts += tl.sum(some, axis=0)
        earlier += tl.sum(tl.where(at + rows < first_row, some, 0), axis=0)
    return counts, earlier


@jit
def tile_and_columns(COLUMNS_FIRST: tl.constexpr):
    """This program's choice tile and column tile. Consecutive programs have neighbouring columns if COLUMNS_FIRST."""
    if COLUMNS_FIRST:
        tile, columns = tl.program_id(1), tl.program_id(0)
    else:
        tile, columns = tl.program_id(0), tl.program_id(1)
    return tile, columns


@jit
def choices_of_tile(tile, experts_ptr, choices_ptr, SINGLE: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile's expert, -1 without choices; its choices [BLOCK_M], and which choices exist.

    With SINGLE, tile i has only choice i, and choices_ptr is not read."""
    expert = tl.load(experts_ptr + tile)
    lanes = tl.arange(0, BLOCK_M)
    choices = tile + lanes
    live = lanes == 0
    if not SINGLE:
        choices = tl.load(choices_ptr + tile * BLOCK_M + lanes)
        live = choices >= 0
    return expert, tl.where(live, choices, 0), live
