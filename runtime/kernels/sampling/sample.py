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

import torch

from runtime.base.sampling_fields import table_of
from runtime.base.types import SamplingParams
from runtime.kernels.sampling.choose import LEVELS, NUM_COUNTERS, choose_kernel
from runtime.kernels.sampling.gumbel import gumbel_noise, noise_keys, noise_of_tokens
from runtime.kernels.sampling.token_keys import FAILED, is_filtered, key_of, load_float, mass_of, packed, write_token
from runtime.kernels.sampling.top_k_top_p import Filters, top_k_top_p_bounds_torch
from runtime.kernels.triton_language import INTERPRETED, ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl

# Columns in a slot's parameters, int32; floats as their bits.
_column_of = {name: column for column, name, _ in table_of(SamplingParams).columns}
TEMPERATURE, TOP_K, TOP_P, MIN_P = (_column_of[name] for name in ("temperature", "top_k", "top_p", "min_p"))
REPETITION, FREQUENCY, PRESENCE = (_column_of[f"{name}_penalty"] for name in ("repetition", "frequency", "presence"))
SEED_LOW, SEED_HIGH, PROMPT_LEN = 1, 2, 9
PENALISED_FROM = 12  # first position at which the captured pass applies penalties; 0 for never
NUM_PARAMS = 16

_TILE = 2048  # tokens per program
_SPAN = 2  # tiles filtered at once
_GROUP = 128  # tokens per group; the groups' best ones bound top-k
_FEW = 512  # tokens gathered for top-k and compared with each other
_PROGRAMS_PER_SM = 4  # programs have 128 threads with at most 128 registers each
_COLUMNS = {
    "TEMPERATURE": TEMPERATURE, "SEED_LOW": SEED_LOW, "SEED_HIGH": SEED_HIGH,
    "TOP_K": TOP_K, "TOP_P": TOP_P, "MIN_P": MIN_P,
}  # fmt: skip


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
    TEMPERATURE: tl.constexpr,
    SEED_LOW: tl.constexpr,
    SEED_HIGH: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    RESAMPLE: tl.constexpr,
    INDEXED: tl.constexpr,
    SPLIT: tl.constexpr,
    FILTERS: tl.constexpr,
    FAILED: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_COUNTERS: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tile * TILE + tl.arange(0, TILE)
    params = params_ptr + tl.load(slots_ptr + row).to(tl.int64) * state_stride
    temperature = load_float(params + TEMPERATURE)
    if PDL:  # rows and their parameters exist since the step's head
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    logits_row = row
    if INDEXED:
        logits_row = tl.load(rows_ptr + row).to(tl.int64)
    logits_ptr += logits_row * logits_stride
    ids, num_tokens = columns, vocab
    if SPLIT:  # noqa: SIM102  # a constexpr
        if tl.load(wanted_ptr + row) == 0:
            logits_ptr = own_ptr + row * own_stride
            ids, num_tokens = first_own + columns, num_own
    logits = tl.load(logits_ptr + columns, mask=columns < num_tokens, other=-float("inf")).to(tl.float32)
    scores = logits
    if temperature > 0:
        low, high = tl.load(params + SEED_LOW), tl.load(params + SEED_HIGH)
        scores = tl.div_rn(logits, temperature) + noise_of_tokens(ids, tl.load(positions_ptr + row), low, high)
        if FILTERS:  # noqa: SIM102  # a constexpr: what depends on it is left out
            if is_filtered(params, TEMPERATURE, TOP_K, TOP_P, MIN_P):
                top = tl.max(logits, axis=0)
                mass = tl.sum(mass_of(logits, top, temperature), axis=0)
                tl.store(tops_ptr + row * work_stride + tile, top.to(tl.int32, bitcast=True))
                tl.store(masses_ptr + row * work_stride + tile, mass.to(tl.int32, bitcast=True))
                if tile == 0:
                    counters = tl.arange(0, 256)
                    tl.store(counters_ptr + row * work_stride + counters, 0, mask=counters < NUM_COUNTERS)
                if tl.load(params + TOP_K) > 0:
                    bests = tl.max(tl.reshape(logits, [TILE // GROUP, GROUP]), axis=1)
                    groups = tile * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
                    tl.store(groups_ptr + row * work_stride + groups, key_of(bests))
    best = tl.max(scores, axis=0)
    key = packed(best, tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), axis=0))
    if not RESAMPLE:
        finite = (tl.abs(logits) < float("inf")) | (columns >= num_tokens)
        key = tl.where(tl.min(finite.to(tl.int32), axis=0) == 1, key, FAILED)
    if SPLIT:
        key = tl.where(tile * TILE < num_tokens, key, -FAILED)
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
    RESAMPLE: tl.constexpr,
    SPLIT: tl.constexpr,
    FAILED: tl.constexpr,
    TILES: tl.constexpr,  # power of two, at least num_tiles
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, tiles = tl.program_id(0), tl.arange(0, TILES)
    keys = tl.load(keys_ptr + row.to(tl.int64) * num_tiles + tiles, mask=tiles < num_tiles, other=-FAILED)
    key = tl.max(keys, axis=0)  # no token's key is as low as -FAILED
    if RESAMPLE:
        key = tl.where(tl.load(token_ids_ptr + tl.load(rows_ptr + row)) < 0, FAILED, key)
    write_token(
        row, key, slots_ptr, positions_ptr, rows_ptr, token_ids_ptr, tokens_ptr, state_stride, RESAMPLE, SPLIT, FAILED
    )


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
    num_tiles, pdl = max(1, -(-vocab // _TILE)), use_pdl(logits)
    keys = torch.empty((n, num_tiles), dtype=torch.int64, device=device)
    sizes = [num_tiles, num_tiles, num_tiles * (_TILE // _GROUP), NUM_COUNTERS, num_tiles * LEVELS, 2 * _FEW]
    work = _workspace(n if filters else 0, sizes, device)
    strides = logits.stride(0), params.stride(0), work[0].stride(0)
    part = (own.logits, own.wanted) if own is not None else (logits, slots)
    part_args = (own.first, own.logits.shape[1], own.logits.stride(0)) if own is not None else (0, 0, 0)
    pass_of = {"RESAMPLE": resample is not None, "SPLIT": own is not None}
    launch = pass_of | {"FAILED": FAILED, "PDL": pdl, "launch_pdl": pdl}
    indexed = resample is not None and not resample.gathered
    form = launch | {"INDEXED": indexed, "TILE": _TILE, "GROUP": _GROUP} | _COLUMNS
    _best_of_tile_kernel[(num_tiles, n)](
        logits, slots, positions, params, rows, *part, keys, *work[:4], vocab, *strides, *part_args,
        FILTERS=filters, NUM_COUNTERS=NUM_COUNTERS, num_warps=4, **form,
    )  # fmt: skip
    tiles = next_power_of_2(num_tiles)
    if not filters:
        _best_of_row_kernel[(n,)](
            keys, slots, positions, rows, answers, tokens, num_tiles, params.stride(0),
            TILES=tiles, num_warps=1, **launch,
        )  # fmt: skip
        return answers
    parts = max(1, min(_num_resident(device) // n, -(-num_tiles // _SPAN)))
    choose_kernel[(parts, n)](
        logits, slots, positions, params, rows, keys, *work, answers, tokens, vocab, num_tiles, *strides,
        SPAN=_SPAN, TILES=tiles, FEW=_FEW, LEVELS=LEVELS, num_warps=4, maxnreg=128, **form,
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
            RESAMPLE=False, SPLIT=False, FAILED=FAILED, TILES=1, PDL=pdl, num_warps=1, launch_pdl=pdl,
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
