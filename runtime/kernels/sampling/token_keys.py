"""Integer keys that order tokens by logit, or by score and then by id; and the token of a row's best key."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from runtime.kernels.sampling.gumbel import gumbel_noise, noise_keys
from runtime.kernels.triton_language import jit, tl

# `drawn_keys_torch`, or a kernel for the same keys.
DrawnKeys = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, bool], torch.Tensor]
FAILED = (1 << 63) - 1  # key of tokens with a non-finite logit; larger than any other
NONE = -FAILED  # the key without tokens; lower than any other
TILE = 2048  # tokens per program
SPAN = 2  # tiles filtered at once
GROUP = 128  # tokens per group; the groups' best ones bound top-k
FEW = 512  # tokens gathered for top-k and compared with each other
LEVELS = 4
NUM_COUNTERS = 2 + 8 * 16  # arrivals at barriers; gathered tokens; tokens that reach each digit's levels


def best_keys_torch(
    scores: torch.Tensor,  # [n, m] float32, for tokens with neighbouring ids
    first: int,  # the first column's token id
) -> torch.Tensor:
    """[n] int64: the largest of each row's `packed` keys."""
    if not scores.shape[1]:
        return torch.full((len(scores),), NONE, dtype=torch.int64, device=scores.device)
    best, at = scores.max(-1)
    bits = (best + 0.0).view(torch.int32)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32) | (0x7FFFFFFF - first - at)


def drawn_keys_torch(
    logits: torch.Tensor,  # [n, m] float32, for tokens with neighbouring ids
    temperatures: torch.Tensor,  # [n] float32; 0 for greedy
    seeds: torch.Tensor,  # [n] int64
    positions: torch.Tensor,  # [n] int32, positions to be drawn
    first: int,  # the first column's token id
    checked: bool,  # a row with a logit that is not finite fails
) -> torch.Tensor:
    """[n] int64: the best key of each row, with Gumbel noise by position where there is a temperature (C4)."""
    scores = logits
    if len(rows := temperatures.nonzero().squeeze(1)):
        ids = torch.arange(first, first + logits.shape[1], dtype=torch.int32, device=logits.device)
        noise = gumbel_noise(noise_keys(seeds[rows], positions[rows])[:, :, None], ids)
        scores = logits.index_copy(0, rows, logits.index_select(0, rows).div_(temperatures[rows, None]).add_(noise))
    keys = best_keys_torch(scores, first)
    return keys.masked_fill_(~logits.sum(-1).isfinite(), FAILED) if checked else keys


def tokens_of_keys_torch(keys: torch.Tensor) -> torch.Tensor:
    """The token ids [n] int64 of keys; -1 for FAILED."""
    return (0x7FFFFFFF - (keys & 0x7FFFFFFF)).masked_fill_(keys == FAILED, -1)


@jit
def load_float(ptr):
    """A float32, stored as the bits of an int32."""
    return tl.load(ptr, cache_modifier=".cg").to(tl.float32, bitcast=True)


@jit
def is_filtered(params, AT: tl.constexpr):
    """True if a row with these parameters (pointers) samples from a part of the vocabulary."""
    drawn = load_float(params + AT.temperature) > 0
    top_p = load_float(params + AT.top_p)
    min_p = load_float(params + AT.min_p)
    return drawn & ((tl.load(params + AT.top_k) > 0) | (top_p < 1.0) | (min_p > 0.0))


@jit
def key_of(x):
    """int32 that orders as the float32 does; with -0.0 as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def float_of(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def packed(scores, ids):
    """int64 that orders by score and then by lowest id."""
    return (key_of(scores).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@jit
def token_of(key):
    """The token id of a packed key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@jit
def mass_of(logits, best, temperature):
    """e^((logit - best) / temperature): probabilities but for one factor. 0 where the logit is -inf, even if the best
    one is."""
    return tl.exp((logits - tl.maximum(best, -3.0e38)) * (1.0 / temperature))


@jit
def is_penalised(params, position, AT: tl.constexpr, ALL_ROWS: tl.constexpr):
    """True if the row with these parameters has penalties; without ALL_ROWS, if the captured pass applies them."""
    if ALL_ROWS:
        others = (load_float(params + AT.frequency) != 0.0) | (load_float(params + AT.presence) != 0.0)
        penalised = (load_float(params + AT.repetition) != 1.0) | others
    else:
        first = tl.load(params + AT.penalised_from, cache_modifier=".cg")
        penalised = (first > 0) & (position >= first)
    return penalised


class SampleForm(NamedTuple):
    """Constants of the kernels that choose tokens."""

    resample: bool
    split: bool  # by ranks: the answer is a key
    tiles: int  # power of two, at least the number of tiles
    pdl: bool
    indexed: bool = False  # with `rows`
    filters: bool = False
    failed: int = FAILED
    tile: int = TILE
    group: int = GROUP
    span: int = SPAN
    few: int = FEW
    levels: int = LEVELS
    num_counters: int = NUM_COUNTERS


@jit
def write_token(
    row, key, slots_ptr, positions_ptr, rows_ptr, token_ids_ptr, tokens_ptr, state_stride, FORM: tl.constexpr
):
    """The row's answer, from its packed key, into the step's and the request's tokens. SPLIT: the key itself, which
    other ranks have yet to agree to, into int64 in the place of the step's."""
    if FORM.split:
        tl.store(token_ids_ptr + row, key)
    else:
        token_id = tl.where(key == FORM.failed, -1, token_of(key))
        at = row
        if FORM.resample:
            at = tl.load(rows_ptr + row)
        tl.store(token_ids_ptr + at, token_id)
        state = tl.load(slots_ptr + row).to(tl.int64) * state_stride + tl.load(positions_ptr + row)
        tl.store(tokens_ptr + state, tl.maximum(token_id, 0))
