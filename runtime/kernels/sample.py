"""One token a row of logits: greedy, or Gumbel-max with noise by position (C4), written into the requests' state.

The vocabulary is cut into tiles of a fixed size, so that one row fills the device and a row's token depends on no
other row. A tile's best score and its token id become one int64 key that orders first by score and then by lowest id;
a row's token is the largest of its keys.

The noise is runtime.kernels.gumbel's, integers bit for bit. Of -log(-log1p(-u)), the inner logarithm is taken as
log(1 - u): u is (k + 1/2) / 2^23 and 1 - u is exact in fp32, so that nothing is lost without log1p, which Triton lacks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from runtime.kernels._triton import ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl
from runtime.kernels.gumbel import gumbel_noise, noise_keys

# Columns of a slot's parameters, int32; floats as their bits.
TEMPERATURE, SEED_LOW, SEED_HIGH, TOP_K, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE, PROMPT_LEN = range(10)
NUM_PARAMS = 16

_TILE = 2048  # tokens of a program
_FAILED = (1 << 63) - 1  # the key of a tile with a value that is not finite; larger than any other


@dataclass(slots=True)
class Again:
    """Some rows of a step are sampled once more, from logits that may be -inf; a row fails if it had failed before.

    With bounds, the logits are those of these rows alone, have all penalties, and are divided by the temperature;
    without, they are the step's, only masked."""

    token_ids: torch.Tensor  # [num_rows] int32 of the whole step, changed in place
    rows: torch.Tensor  # [n] int32, where in token_ids the rows are
    bounds: torch.Tensor | None = None  # [n] float32: rows with a temperature keep the tokens whose logit reaches it


def sample_tokens_torch(
    logits: torch.Tensor,  # [n, vocab], or those of all rows of a step that some are sampled again from
    slots: torch.Tensor,  # [n] int32
    positions: torch.Tensor,  # [n] int32, of the token to be sampled
    tokens: torch.Tensor,  # [num_slots + 1, max_model_len] int32; the token goes to [slot, position], a failed one as 0
    params: torch.Tensor,  # [num_slots + 1, NUM_PARAMS] int32, rows as far apart as those of tokens
    again: Again | None = None,
) -> torch.Tensor:
    """token_ids [n] int32: the best token, or with a temperature a drawn one; -1 for a row that is not finite (C9)."""
    if again is not None and again.bounds is None:
        logits = logits.index_select(0, again.rows)
    logits = logits.float()
    own = params[slots.long()]
    temperature = own[:, TEMPERATURE].view(torch.float32)[:, None]
    seeds = (own[:, SEED_HIGH].long() << 32) | (own[:, SEED_LOW].long() & 0xFFFFFFFF)
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    noise = gumbel_noise(noise_keys(seeds, positions)[:, :, None], ids)
    if again is None or again.bounds is None:
        scaled = logits / temperature.where(temperature > 0, 1.0)
    else:
        scaled = logits.masked_fill(logits < again.bounds[:, None], -math.inf)
    failed = ~logits.isfinite().all(-1) if again is None else again.token_ids[again.rows.long()] < 0
    chosen = torch.where(temperature > 0, scaled + noise, logits).argmax(-1).int().masked_fill_(failed, -1)
    tokens[slots.long(), positions.long()] = chosen.clamp(min=0)
    if again is None:
        return chosen
    again.token_ids[again.rows.long()] = chosen
    return again.token_ids


@jit
def _shift_right(h, BITS: tl.constexpr):
    """Logical, of int32."""
    return (h >> BITS) & ((1 << (32 - BITS)) - 1)


@jit
def _keyed_hash(h, key):
    """As in runtime.kernels.gumbel. 0x846CA68B is written as the int32 that it is."""
    h = (h ^ _shift_right(h, 16)) * 0x7FEB352D
    h = h ^ key
    h = (h ^ _shift_right(h, 15)) * -0x7B935975
    return h ^ _shift_right(h, 16)


@jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def _best_of_tile_kernel(
    logits_ptr,  # [n, vocab] fp32, bf16 or fp16, rows logits_stride apart
    slots_ptr,  # [n]
    positions_ptr,  # [n]
    params_ptr,  # [num_slots + 1, NUM_PARAMS] int32, rows state_stride apart
    rows_ptr,  # [n], of the logits; read with AGAIN, if there are no bounds
    bounds_ptr,  # [n] float32; read with BOUNDED
    keys_ptr,  # [n, num_tiles] int64
    vocab,
    logits_stride,
    state_stride,
    TEMPERATURE: tl.constexpr,
    SEED_LOW: tl.constexpr,
    SEED_HIGH: tl.constexpr,
    AGAIN: tl.constexpr,
    BOUNDED: tl.constexpr,
    FAILED: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    ids = tile * TILE + tl.arange(0, TILE)
    logits_row = row
    if AGAIN and not BOUNDED:
        logits_row = tl.load(rows_ptr + row).to(tl.int64)
    logits = tl.load(logits_ptr + logits_row * logits_stride + ids, mask=ids < vocab, other=-float("inf")).to(
        tl.float32
    )
    params = params_ptr + tl.load(slots_ptr + row).to(tl.int64) * state_stride
    temperature = tl.load(params + TEMPERATURE).to(tl.float32, bitcast=True)
    scores = logits
    if temperature > 0:
        low, high = tl.load(params + SEED_LOW), tl.load(params + SEED_HIGH)
        first = _keyed_hash(_keyed_hash(tl.load(positions_ptr + row) ^ low, 0) ^ high, -0x61C88647)
        second = _keyed_hash(first ^ low, 0)
        if BOUNDED:
            scores = tl.where(logits >= tl.load(bounds_ptr + row), logits, -float("inf"))
        else:
            scores = tl.div_rn(logits, temperature)
        bits = _shift_right(_keyed_hash(ids ^ first, second), 9)
        rest = 1.0 - (bits.to(tl.float32) + 0.5) * (1.0 / (1 << 23))
        scores = scores - tl.log(-tl.log(rest))
    best = tl.max(scores, axis=0)
    best_id = tl.min(tl.where(scores == best, ids, 0x7FFFFFFF), axis=0)
    ordered = (best + 0.0).to(tl.int32, bitcast=True)  # the addition makes -0.0 a 0.0
    ordered = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)  # orders as the floats do
    key = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - best_id).to(tl.int64)
    if not AGAIN:
        finite = (tl.abs(logits) < float("inf")) | (ids >= vocab)
        key = tl.where(tl.min(finite.to(tl.int32), axis=0) == 1, key, FAILED)
    tl.store(keys_ptr + row * tl.num_programs(0) + tile, key)


@jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def _best_of_row_kernel(
    keys_ptr,  # [n, num_tiles] int64
    slots_ptr,  # [n]
    positions_ptr,  # [n]
    rows_ptr,  # [n]; not read without AGAIN
    token_ids_ptr,  # [num_rows] int32
    tokens_ptr,  # [num_slots + 1, max_model_len] int32, rows state_stride apart
    num_tiles,
    state_stride,
    AGAIN: tl.constexpr,
    FAILED: tl.constexpr,
    BLOCK: tl.constexpr,  # power of two, at least num_tiles
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    tiles = tl.arange(0, BLOCK)
    lowest = -FAILED  # no key is as low
    keys = tl.load(keys_ptr + row.to(tl.int64) * num_tiles + tiles, mask=tiles < num_tiles, other=lowest)
    key = tl.max(keys, axis=0)
    token_id = tl.where(key == FAILED, -1, 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32))
    at = token_ids_ptr + row
    if AGAIN:
        at = token_ids_ptr + tl.load(rows_ptr + row)
        token_id = tl.where(tl.load(at) < 0, -1, token_id)
    tl.store(at, token_id)
    state = tokens_ptr + tl.load(slots_ptr + row).to(tl.int64) * state_stride + tl.load(positions_ptr + row)
    tl.store(state, tl.maximum(token_id, 0))


def sample_tokens_triton(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    params: torch.Tensor,
    again: Again | None = None,
) -> torch.Tensor:
    """`sample_tokens_torch` as two kernels that read the logits once."""
    n, vocab = len(slots), logits.shape[1]
    bounds = None if again is None else again.bounds
    if again is None:
        token_ids, rows = torch.empty(n, dtype=torch.int32, device=logits.device), slots
    else:
        token_ids, rows = again.token_ids, again.rows
    if n:
        num_tiles, pdl = -(-vocab // _TILE), use_pdl(logits)
        keys = torch.empty((n, num_tiles), dtype=torch.int64, device=logits.device)
        _best_of_tile_kernel[(num_tiles, n)](
            logits, slots, positions, params, rows, logits if bounds is None else bounds, keys,
            vocab, logits.stride(0), params.stride(0),
            TEMPERATURE=TEMPERATURE, SEED_LOW=SEED_LOW, SEED_HIGH=SEED_HIGH,
            AGAIN=again is not None, BOUNDED=bounds is not None, FAILED=_FAILED,
            TILE=_TILE, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
        _best_of_row_kernel[(n,)](
            keys, slots, positions, rows, token_ids, tokens, num_tiles, tokens.stride(0),
            AGAIN=again is not None, FAILED=_FAILED, BLOCK=next_power_of_2(num_tiles),
            PDL=pdl, num_warps=1, launch_pdl=pdl,
        )  # fmt: skip
    return token_ids
