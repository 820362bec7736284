"""Paged attention: a step's rows, a tile's search for its row, one softmax step, and the torch twin.

One layer's cache is kv [2, num_kv_heads, num_blocks, block_size, head_dim]. A row's position p lies in block
tables[slot, p // block_size] at offset p % block_size. A row is a run of one request's new tokens; its k and v are
already in the cache. The token at position p sees positions `first_key`..p, or the last `window` of them.
A token that sees nothing gets zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from runtime.kernels.attention.stored_kv import WEIGHT_LOG2, dequantize_kv, upcast_pairs
from runtime.kernels.triton_language import jit, next_power_of_2, tl

LOG2_E = 1.4426950408889634


class AttentionForm(NamedTuple):
    """One layer's softmax(q k^T * scale) v."""

    scale: float
    window: int = 0  # positions that a token sees, itself included; 0 for all
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0 disables it
    sinks: torch.Tensor | None = None  # [num_heads] float32, each head's score without key and value
    whole_images: bool = False  # tokens see all positions up to `last_visible`
    first_key: int = 0  # first position that any token sees: 0, or 1 where position 0 holds nothing (draft heads)


@dataclass(slots=True)
class PagedRows:
    """Rows of one attention call. Tensors are on the device; the ints are the host's and may be upper bounds."""

    slots: torch.Tensor  # [num_rows] int32, row in `tables`
    starts: torch.Tensor  # [num_rows] int32, position of the row's first token
    q_starts: torch.Tensor  # [num_rows + 1] int32, the row's first token in q, and the last row's end
    tables: torch.Tensor  # [num_slots + 1, max_blocks] int32 block ids, any stride between rows
    num_rows: int
    num_tokens: int
    max_count: int  # most tokens in a row
    max_len: int  # the most positions that a row's last token sees
    # True if no launch in this step writes a key before a row's start. A row that shares the prefix could do that.
    prefix_ready: bool = False
    # [tokens in q] int32, the last position that each token sees in layers with whole images; None for its own
    last_visible: torch.Tensor | None = None
    # The programs' segments (segments.py), by the launch's sizes. All layers share them. A copy of the rows
    # begins without any, since its tensors may differ.
    segments: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict, init=False, repr=False)


@dataclass(slots=True)
class PagedBatch:
    """A step's rows in parts, one attention call each; they cover its tokens in order."""

    num_tokens: int
    parts: list[PagedRows]


def paged_attention_torch(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    kv: torch.Tensor,  # [2, num_kv_heads, num_blocks, block_size, head_dim]
    rows: PagedRows,
    form: AttentionForm,
    scales: torch.Tensor | None = None,  # a quantized cache's scales (stored_kv.py)
    out: torch.Tensor | None = None,  # [num_tokens, num_heads * head_dim]
) -> torch.Tensor:
    """[num_tokens, num_heads * head_dim] in q's dtype, computed in fp32 or wider, row by row."""
    (num_tokens, num_heads, head_dim), (scale, window, soft_cap, sinks, whole_images, first_key) = q.shape, form
    num_kv_heads, block_size = kv.shape[1], kv.shape[3]
    wide = torch.promote_types(q.dtype, torch.float32)
    result = q.new_empty(num_tokens, num_heads * head_dim) if out is None else out
    edges, group = rows.q_starts.tolist(), num_heads // num_kv_heads
    for row, (slot, start) in enumerate(zip(rows.slots.tolist(), rows.starts.tolist(), strict=True)):
        first, end = edges[row], edges[row + 1]
        length = start + end - first
        blocks = rows.tables[slot, : -(-length // block_size)].long()
        own_kv = kv[:, :, blocks].flatten(2, 3)
        if scales is not None:
            own_kv = dequantize_kv(own_kv, scales if scales.dim() == 2 else scales[:, blocks].flatten(1, 2))
        # Blocks below the window may belong to other requests (C9), and nothing is stored below `first_key`.
        own_kv[:, :, : max(first_key, start - (window or length) + 1)] = 0
        k, v = own_kv[:, :, :length].to(wide)
        own = q[first:end].to(wide).view(end - first, num_kv_heads, group, head_dim)
        scores = torch.einsum("tngd,nsd->ngts", own, k) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        keys, queries = torch.arange(length, device=q.device), torch.arange(start, length, device=q.device)[:, None]
        last = queries
        if whole_images and rows.last_visible is not None:
            last = rows.last_visible[first:end, None]
        lowest = (queries - (window or length) + 1).clamp(min=first_key)
        hidden = (keys > last) | (keys < torch.minimum(lowest, last))  # a softmax over nothing would be NaN
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(wide).view(num_kv_heads, -1, 1, 1).expand(-1, -1, end - first, 1)), -1)
        weights = scores.softmax(-1)[..., :length]
        result[first:end] = torch.einsum("ngts,nsd->tngd", weights, v).flatten(1).to(q.dtype)
    return result


def rows_searched(num_rows: int) -> int:
    """ROWS of `find_row`: the same for almost every step, since each value is another compiled kernel."""
    return max(256, int(next_power_of_2(num_rows)))


@jit
def find_row(q_starts_ptr, tile, num_rows, TILE_TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """(row, its tile) at place `tile` among num_tokens // TILE_TOKENS + num_rows places for tiles of TILE_TOKENS
    tokens.

    Row r, with t tokens in the rows before it, owns the places from t // TILE_TOKENS + r on. It has at least as many
    places as tiles. A spare place starts behind the row's last token. ROWS is a power of two, at least num_rows."""
    indices = tl.arange(0, ROWS)
    origin = tl.load(q_starts_ptr)
    first = tl.load(q_starts_ptr + indices, mask=indices < num_rows, other=0) - origin
    first = first // TILE_TOKENS + indices
    row = tl.sum(((first <= tile) & (indices < num_rows)).to(tl.int32), axis=0) - 1
    return row, tile - (tl.load(q_starts_ptr + row) - origin) // TILE_TOKENS - row


@jit
def find_places(table_ptr, positions, inside, BLOCK_SIZE: tl.constexpr):
    """The places of a row's positions in a head's cache: block * BLOCK_SIZE + offset. inside: or None."""
    if inside is None:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE)
    else:
        blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=inside, other=0)
    return blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE


@jit
def first_seen(start, FORM: tl.constexpr):
    """The first position that a tile's token sees; the tile's first token is at position `start`."""
    first = FORM.first_key
    if FORM.window > 0:
        first = tl.maximum(start - FORM.window + 1, first) if FORM.first_key > 0 else start - FORM.window + 1
    return first


@jit
def is_inside(positions, first, stop, FORM: tl.constexpr):
    """Positions before `stop` that a token sees: blocks below the window may belong to other requests (C9)."""
    return (positions < stop) & (positions >= first) if FORM.window + FORM.first_key > 0 else positions < stop


@jit
def tile_pointers(k_ptr, places, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Where the keys at `places` of one kv head are: [len(places), BLOCK_D] pointers."""
    return k_ptr + (places * HEAD_DIM)[:, None] + tl.arange(0, BLOCK_D)[None, :]


@jit
def load_tile(pointers, inside, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys or values, zeros where not inside: what lies beyond a row may be anything, and zero times NaN is NaN."""
    dims = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    if inside is None and HEAD_DIM == BLOCK_D:
        tile = tl.load(pointers)
    elif inside is None:
        tile = tl.load(pointers, mask=dims, other=0.0)
    elif HEAD_DIM == BLOCK_D:
        tile = tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=inside[:, None] & dims, other=0.0)
    return tile


@jit
def token_scales(scales_ptr, kv_head, head_stride, HEAD_DIM: tl.constexpr, SCALES: tl.constexpr):
    """Where a head's token scales are: a key's and a value's are read as one number, large enough to be read ahead."""
    if SCALES == "token":
        scales_ptr = scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
        scales_ptr += kv_head.to(tl.int64) * (head_stride // HEAD_DIM)
    return scales_ptr


@jit
def load_scales(pointers, inside):
    """Keys' and values' scales of tokens, zeros where not inside."""
    both = tl.load(pointers) if inside is None else tl.load(pointers, mask=inside, other=0)
    return both.to(tl.int16).to(tl.float16, bitcast=True), (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)


@jit
def first_total(last_visible, FORM: tl.constexpr):
    """A running softmax's weight sum before all positions: 1 for a token that sees nothing, so its result is 0."""
    total = tl.full(last_visible.shape, 0, tl.float32)
    if FORM.first_key > 0:
        total = (last_visible < FORM.first_key).to(tl.float32)
    return total


@jit
def attend_tile(
    q, k, v, k_scales, v_scales, positions, q_positions, last_visible, m, total, acc, scale_log2,
    MASKED: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys and values to the running softmax; they may be quantized."""
    if FORM.scales != "none":
        k, v = k.to(q.dtype), v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    m, total, weights, fade = softmax_step(
        scores, k_scales, v_scales, positions, q_positions, last_visible, m, total, scale_log2, MASKED, FORM
    )
    acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return m, total, acc


@jit
def softmax_step(
    scores,  # [M, N] q k^T
    k_scales,  # [N], read if FORM.scales is "token"
    v_scales,
    positions,  # [N]
    q_positions,  # [M]
    last_visible,  # [M] the last position that each q sees
    m,  # [M] highest score so far; scores count in log2 units; at first finite and below all
    total,  # [M] sum of 2**(score - m)
    scale_log2,  # scale * log2(e), positive
    MASKED: tl.constexpr,  # false if each q sees all positions
    FORM: tl.constexpr,
):
    """One step of the online softmax (arXiv 1805.02867, 2205.14135): (m, total, the values' weights [M, N], the factor
    for sums so far). Since m is finite, -inf is handled like any score."""
    if FORM.scales == "token":
        scores *= k_scales.to(tl.float32)[None, :]
    if FORM.soft_cap > 0:  # SOFT_CAP * tanh(score / SOFT_CAP); as 1 - 2 / (e**2x + 1) it cannot overflow
        scores = 1 - 2 / (tl.exp2(scores * (scale_log2 * 2 / FORM.soft_cap)) + 1)
        scale_log2 = FORM.soft_cap * 1.4426950408889634
    if MASKED:
        seen = positions[None, :] <= last_visible[:, None]
        if FORM.window > 0:
            seen &= positions[None, :] > q_positions[:, None] - FORM.window
        if FORM.first_key > 0:
            seen &= (positions >= FORM.first_key)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(m, tl.max(scores, axis=1) * scale_log2)
    weight_of_one = top - WEIGHT_LOG2 if FORM.scales == "token" else top
    weights = tl.exp2(scores * scale_log2 - weight_of_one[:, None])
    fade = tl.exp2(m - top)
    total = total * fade + tl.sum(weights, axis=1)
    if FORM.scales == "token":
        weights *= v_scales.to(tl.float32)[None, :]
    return top, total, weights, fade


@jit
def load_sinks(sinks_ptr, kv_head, count, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The sinks for a tile with `count` tokens and GROUP heads each [ROWS]; None if the model lacks them."""
    sinks = None
    if sinks_ptr is not None:
        rows = tl.arange(0, ROWS)
        sinks = tl.load(sinks_ptr + kv_head * GROUP + rows % GROUP, mask=rows < count * GROUP, other=0.0)
    return sinks


@jit
def add_sinks(m, total, sinks, SCALES: tl.constexpr):
    """A row's weight sum including its sink: added once, after all positions, so that no split shows.

    Explicit fma, so that it rounds alike wherever it is inlined. An infinite weight makes the result zero."""
    if sinks is not None:
        weight_of_one = m - WEIGHT_LOG2 if SCALES == "token" else m
        total += tl.exp2(tl.fma(sinks, tl.full(sinks.shape, 1.4426950408889634, tl.float32), -weight_of_one))
    return total


@jit
def attend_range(
    q, q_positions, last_visible, k_ptr, kv_stride, scales_ptr, table_ptr, begin, stop, m, total, acc, scale_log2,
    FORM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Absorbs positions begin..stop, begin at a multiple of BLOCK_N; if not MASKED, stop too."""
    if FORM.scales == "none":
        first = first_seen(tl.min(q_positions, axis=0), FORM)
        for at in range(begin, stop, FORM.block_n):
            positions = at + tl.arange(0, FORM.block_n)
            inside = is_inside(positions, first, stop, FORM) if MASKED else None
            places = find_places(table_ptr, positions, inside, FORM.block_size)
            pointers = tile_pointers(k_ptr, places, FORM.head_dim, FORM.block_d)
            k = load_tile(pointers, inside, FORM.head_dim, FORM.block_d)
            v = load_tile(pointers + kv_stride, inside, FORM.head_dim, FORM.block_d)
            m, total, acc = attend_tile(
                q, k, v, None, None, positions, q_positions, last_visible, m, total, acc, scale_log2, MASKED, FORM
            )
    else:
        m, total, acc = _attend_quantized(
            q, q_positions, last_visible, k_ptr, kv_stride, scales_ptr, table_ptr, begin, stop, m, total, acc, FORM,
            MASKED,
        )  # fmt: skip
    return m, total, acc


@jit
def _attend_quantized(
    q, q_positions, last_visible, k_ptr, kv_stride, scales_ptr, table_ptr, begin, stop, m, total, acc,
    FORM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`attend_range` for a quantized cache.

    A product takes values by position pairs, and shared memory would swap a pair's bytes. Two neighbouring
    dimensions are therefore read as one int16, and even and odd dimensions are multiplied separately."""
    PAIRS: tl.constexpr = FORM.head_dim // 2
    HALF: tl.constexpr = FORM.block_d // 2
    STORED: tl.constexpr = k_ptr.dtype.element_ty
    q_even, q_odd = tl.split(tl.reshape(q, (q.shape[0], HALF, 2)))
    even, odd = tl.split(tl.reshape(acc, (acc.shape[0], HALF, 2)))
    k_ptr = k_ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    offsets, first = tl.arange(0, FORM.block_n), first_seen(tl.min(q_positions, axis=0), FORM)
    for at in range(begin, stop, FORM.block_n):
        positions = at + offsets
        inside = is_inside(positions, first, stop, FORM) if MASKED else None
        if FORM.block_n % FORM.block_size == 0:  # a tile begins with a block: what lies within one is the same for all
            places = find_places(table_ptr + at // FORM.block_size, offsets, inside, FORM.block_size)
        else:
            places = find_places(table_ptr, positions, inside, FORM.block_size)
        pointers = tile_pointers(k_ptr, places, PAIRS, HALF)
        k_even, k_odd = upcast_pairs(load_tile(pointers, inside, PAIRS, HALF), STORED, q.dtype)
        v_even, v_odd = upcast_pairs(load_tile(pointers + kv_stride // 2, inside, PAIRS, HALF), STORED, q.dtype)
        if FORM.scales == "token":
            k_scales, v_scales = load_scales(scales_ptr + places, inside)
        else:
            k_scales, v_scales = None, None
        scores = tl.dot(q_even, tl.trans(k_even), input_precision="ieee")
        scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision="ieee")
        m, total, weights, fade = softmax_step(
            scores, k_scales, v_scales, positions, q_positions, last_visible, m, total, 1.0, MASKED, FORM
        )
        weights = weights.to(q.dtype)
        even = tl.dot(weights, v_even, even * fade[:, None], input_precision="ieee")
        odd = tl.dot(weights, v_odd, odd * fade[:, None], input_precision="ieee")
    return m, total, tl.interleave(even, odd)
