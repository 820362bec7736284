"""One token for each logits row, written into its request's state.

Sampling is greedy, or Gumbel-max with noise by position (C4) among the tokens that survive top-k, top-p and min-p. The
vocabulary is cut into fixed-size tiles: one row fills the device, and a row's token depends on no other row. A
tile's best score and its token id become one int64 key, which orders by score and then by lowest id. A row's token has
its largest key, unless a filter excludes it (`choose.py`). Where ranks have parts of the vocabulary, each rank
sends its largest key to the others. The noise has the integers of `gumbel.py`, bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch

from runtime.base.sampling_fields import table_of
from runtime.base.types import SamplingParams
from runtime.kernels.sampling.choose import choose_kernel
from runtime.kernels.sampling.gumbel import gumbel_noise, noise_keys, noise_of_tokens
from runtime.kernels.sampling.token_keys import (
    FEW,
    GROUP,
    LEVELS,
    NUM_COUNTERS,
    SPAN,
    TILE,
    SampleForm,
    is_filtered,
    key_of,
    load_float,
    mass_of,
    packed,
    write_token,
)
from runtime.kernels.sampling.top_k_top_p import Filters, top_k_top_p_bounds_torch
from runtime.kernels.triton_language import INTERPRETED, ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl

# Columns in a slot's parameters, int32; floats as their bits.
_column_of = {name: column for column, name, _ in table_of(SamplingParams).columns}
TEMPERATURE, TOP_K, TOP_P, MIN_P = (_column_of[name] for name in ("temperature", "top_k", "top_p", "min_p"))
REPETITION, FREQUENCY, PRESENCE = (_column_of[f"{name}_penalty"] for name in ("repetition", "frequency", "presence"))
SEED_LOW, SEED_HIGH, PROMPT_LEN = 1, 2, 9
PENALISED_FROM = 12  # first position at which the captured pass applies penalties; 0 for never
NUM_PARAMS = 16

_PROGRAMS_PER_SM = 4  # programs have 128 threads with at most 128 registers each


class Columns(NamedTuple):
    """The columns as one constant for kernels."""

    temperature: int = TEMPERATURE
    seed_low: int = SEED_LOW
    seed_high: int = SEED_HIGH
    top_k: int = TOP_K
    top_p: int = TOP_P
    min_p: int = MIN_P
    repetition: int = REPETITION
    frequency: int = FREQUENCY
    presence: int = PRESENCE
    prompt_len: int = PROMPT_LEN
    penalised_from: int = PENALISED_FROM


COLUMNS = Columns()


def filters_of(params: torch.Tensor) -> Filters:
    """Return the filters in rows of parameters, [n, NUM_PARAMS] int32."""
    floats = params.view(torch.float32)
    return Filters(params[:, TOP_K], floats[:, TOP_P], floats[:, MIN_P])


@dataclass(slots=True)
class Resample:
    """Rows of a step to sample once more, from logits that may be -inf. A row that had failed fails again."""

    token_ids: torch.Tensor  # [num_rows] int32, the whole step's, changed in place
    rows: torch.Tensor  # [n] int32, where in token_ids the rows are
    gathered: bool  # true if the logits have only these rows, false if they have the whole step's


@dataclass(slots=True)
class OwnLogits:
    """A rank's part of the logits, which decides all rows that are not `wanted`."""

    logits: torch.Tensor  # [n, num_own] float32
    first: int  # the first column's token id
    wanted: torch.Tensor  # [n] int32: not 0 for rows that need all ranks' logits


def sample_tokens_torch(
    logits: torch.Tensor,  # [n, vocab]; all the step's rows with an ungathered `resample`
    slots: torch.Tensor,  # [n] int32
    positions: torch.Tensor,  # [n] int32, positions to be sampled
    tokens: torch.Tensor,  # [num_slots + 1, max_model_len] int32; the token goes to [slot, position], a failed one as 0
    params: torch.Tensor,  # [num_slots + 1, NUM_PARAMS] int32, has the row stride of tokens
    resample: Resample | None = None,
    filters: bool = True,  # false if all rows are without filters
) -> torch.Tensor:
    """token_ids [n] int32: the best token, or with a temperature a sampled one; -1 if a row is not finite (C9)."""
    if resample is not None and not resample.gathered:
        logits = logits.index_select(0, resample.rows)
    logits = logits.float()
    own = params[slots.long()]
    floats = own.view(torch.float32)
    temperature = floats[:, TEMPERATURE, None]
    seeds = (own[:, SEED_HIGH].long() << 32) | (own[:, SEED_LOW].long() & 0xFFFFFFFF)
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    noise = gumbel_noise(noise_keys(seeds, positions)[:, :, None], ids)
    scaled = logits / temperature.where(temperature > 0, 1.0)
    if filters:
        row_filters = filters_of(own)
        top_p = row_filters.top_p.where(temperature[:, 0] > 0, 1.0)
        bounds = top_k_top_p_bounds_torch(scaled, row_filters._replace(top_p=top_p))
        scaled = scaled.masked_fill(scaled < bounds[:, None], -math.inf)
    failed = ~logits.isfinite().all(-1) if resample is None else resample.token_ids[resample.rows.long()] < 0
    chosen = torch.where(temperature > 0, scaled + noise, logits).argmax(-1).int().masked_fill_(failed, -1)
    tokens[slots.long(), positions.long()] = chosen.clamp(min=0)
    if resample is None:
        return chosen
    resample.token_ids[resample.rows.long()] = chosen
    return resample.token_ids


@jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def _best_of_tile_kernel(
    logits_ptr,  # [n, vocab] fp32, bf16 or fp16, rows logits_stride apart
    slots_ptr,  # [n]
    positions_ptr,  # [n]
    params_ptr,  # [num_slots + 1, NUM_PARAMS] int32, rows state_stride apart
    rows_ptr,  # [n], logits rows; read with INDEXED
    # Read with SPLIT:
    own_ptr,  # [n, num_own] fp32: for token ids from first_own on
    wanted_ptr,  # [n] int32: 0 for rows that own_ptr decides
    keys_ptr,  # [n, num_tiles] int64
    # Written for filtered rows; rows are work_stride apart:
    tops_ptr,  # [n, num_tiles] int32: each tile's best logit, as bits
    masses_ptr,  # [n, num_tiles] int32: each tile's mass, as bits, in units of its best token's
    groups_ptr,  # [n, num_tiles * TILE / GROUP] int32: keys of groups' best logits, set for rows with top-k
    counters_ptr,  # [n, NUM_COUNTERS] int32: 0
    vocab,
    logits_stride,
    state_stride,
    work_stride,
    first_own,
    num_own,
    own_stride,
    AT: tl.constexpr,  # `Columns`
    FORM: tl.constexpr,  # `SampleForm`
):
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tile * FORM.tile + tl.arange(0, FORM.tile)
    params = params_ptr + tl.load(slots_ptr + row).to(tl.int64) * state_stride
    temperature = load_float(params + AT.temperature)
    if FORM.pdl:  # rows and their parameters exist since the step's head
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    logits_row = row
    if FORM.indexed:
        logits_row = tl.load(rows_ptr + row).to(tl.int64)
    logits_ptr += logits_row * logits_stride
    ids, num_tokens = columns, vocab
    if FORM.split:  # noqa: SIM102  # a constexpr
        if tl.load(wanted_ptr + row) == 0:
            logits_ptr = own_ptr + row * own_stride
            ids, num_tokens = first_own + columns, num_own
    logits = tl.load(logits_ptr + columns, mask=columns < num_tokens, other=-float("inf")).to(tl.float32)
    scores = logits
    if temperature > 0:
        low, high = tl.load(params + AT.seed_low), tl.load(params + AT.seed_high)
        scores = tl.div_rn(logits, temperature) + noise_of_tokens(ids, tl.load(positions_ptr + row), low, high)
        if FORM.filters:  # noqa: SIM102  # a constexpr: what depends on it is left out
            if is_filtered(params, AT):
                top = tl.max(logits, axis=0)
                mass = tl.sum(mass_of(logits, top, temperature), axis=0)
                tl.store(tops_ptr + row * work_stride + tile, top.to(tl.int32, bitcast=True))
                tl.store(masses_ptr + row * work_stride + tile, mass.to(tl.int32, bitcast=True))
                if tile == 0:
                    counters = tl.arange(0, 256)
                    tl.store(counters_ptr + row * work_stride + counters, 0, mask=counters < FORM.num_counters)
                if tl.load(params + AT.top_k) > 0:
                    bests = tl.max(tl.reshape(logits, [FORM.tile // FORM.group, FORM.group]), axis=1)
                    groups = tile * (FORM.tile // FORM.group) + tl.arange(0, FORM.tile // FORM.group)
                    tl.store(groups_ptr + row * work_stride + groups, key_of(bests))
    best = tl.max(scores, axis=0)
    key = packed(best, tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), axis=0))
    if not FORM.resample:
        finite = (tl.abs(logits) < float("inf")) | (columns >= num_tokens)
        key = tl.where(tl.min(finite.to(tl.int32), axis=0) == 1, key, FORM.failed)
    if FORM.split:
        key = tl.where(tile * FORM.tile < num_tokens, key, -FORM.failed)
    tl.store(keys_ptr + row * tl.num_programs(0) + tile, key)


@jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def _best_of_row_kernel(
    keys_ptr,  # [n, num_tiles] int64
    slots_ptr,  # [n]
    positions_ptr,  # [n]
    rows_ptr,  # [n]; not read without RESAMPLE
    token_ids_ptr,  # [num_rows] int32; keys, [n] int64, if SPLIT
    tokens_ptr,  # [num_slots + 1, max_model_len] int32, rows state_stride apart
    num_tiles,
    state_stride,
    FORM: tl.constexpr,  # `SampleForm`
):
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, tiles = tl.program_id(0), tl.arange(0, FORM.tiles)
    keys = tl.load(keys_ptr + row.to(tl.int64) * num_tiles + tiles, mask=tiles < num_tiles, other=-FORM.failed)
    key = tl.max(keys, axis=0)  # no token's key is as low as -FAILED
    if FORM.resample:
        key = tl.where(tl.load(token_ids_ptr + tl.load(rows_ptr + row)) < 0, FORM.failed, key)
    write_token(row, key, slots_ptr, positions_ptr, rows_ptr, token_ids_ptr, tokens_ptr, state_stride, FORM)


def sample_tokens_triton(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    params: torch.Tensor,
    resample: Resample | None = None,
    filters: bool = True,
    own: OwnLogits | None = None,
) -> torch.Tensor:
    """`sample_tokens_torch` as two kernels: one scores all tokens, and one chooses.

    With `own`, the answer is keys [n] int64. The largest among all ranks' keys go to `write_tokens_triton`, which
    answers as `sample_tokens_torch` does for all logits."""
    n, vocab, device = len(slots), logits.shape[1], logits.device
    if resample is None:
        answers, rows = torch.empty(n, dtype=torch.int32 if own is None else torch.int64, device=device), slots
    else:
        answers, rows = resample.token_ids, resample.rows
    if not n:
        return answers
    num_tiles, pdl = max(1, -(-vocab // TILE)), use_pdl(logits)
    keys = torch.empty((n, num_tiles), dtype=torch.int64, device=device)
    sizes = [num_tiles, num_tiles, num_tiles * (TILE // GROUP), NUM_COUNTERS, num_tiles * LEVELS, 2 * FEW]
    work = _workspace(n if filters else 0, sizes, device)
    strides = logits.stride(0), params.stride(0), work[0].stride(0)
    part = (own.logits, own.wanted) if own is not None else (logits, slots)
    part_args = (own.first, own.logits.shape[1], own.logits.stride(0)) if own is not None else (0, 0, 0)
    indexed = resample is not None and not resample.gathered
    form = SampleForm(resample is not None, own is not None, next_power_of_2(num_tiles), pdl, indexed, filters)
    _best_of_tile_kernel[(num_tiles, n)](
        logits, slots, positions, params, rows, *part, keys, *work[:4], vocab, *strides, *part_args,
        COLUMNS, form, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    if not filters:
        _best_of_row_kernel[(n,)](
            keys,
            slots,
            positions,
            rows,
            answers,
            tokens,
            num_tiles,
            params.stride(0),
            form,
            num_warps=1,
            launch_pdl=pdl,
        )
        return answers
    parts = max(1, min(_num_resident(device) // n, -(-num_tiles // SPAN)))
    choose_kernel[(parts, n)](
        logits, slots, positions, params, rows, keys, *work, answers, tokens, vocab, num_tiles, *strides,
        COLUMNS, form, num_warps=4, maxnreg=128, launch_pdl=pdl,
    )  # fmt: skip
    return answers


def write_tokens_triton(
    keys: torch.Tensor,  # [n] int64, all ranks' largest
    slots: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,  # [num_slots + 1, max_model_len] int32; the token goes to [slot, position], a failed one as 0
) -> torch.Tensor:
    """token_ids [n] int32 of keys, as `sample_tokens_torch` has them."""
    n, pdl = len(slots), use_pdl(keys)
    token_ids = torch.empty(n, dtype=torch.int32, device=keys.device)
    if n:
        _best_of_row_kernel[(n,)](
            keys, slots, positions, slots, token_ids, tokens, 1, tokens.stride(0),
            SampleForm(False, False, 1, pdl), num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
    return token_ids


@cache
def _num_resident(device: torch.device) -> int:
    """choose_kernel's programs that certainly run at the same time; a row's programs wait for each other."""
    return 1 if INTERPRETED else _PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def _workspace(n: int, sizes: list[int], device: torch.device) -> list[torch.Tensor]:
    """int32 views [n, size] of one allocation; floats are stored as their bits.

    All views have one stride and 16-byte alignment, so that Triton compiles one kernel for any number of rows."""
    ends = list(accumulate((-(-size // 4) * 4 for size in sizes), initial=0))
    work = torch.empty((n, ends[-1]), dtype=torch.int32, device=device)
    return [work[:, start : start + size] for start, size in zip(ends, sizes, strict=False)]
