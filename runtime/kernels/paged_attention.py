"""What attention kernels over the paged KV cache share: the rows of a step, how tiles find theirs, the torch twin.

One layer's cache is kv [2, num_kv_heads, num_blocks, block_size, head_dim]. Position p of a row lies in block
tables[slot, p // block_size] at offset p % block_size. A row is a run of new tokens of one request; its k and v are
already in the cache. The token at position p sees positions 0..p, or the last `window` of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kernels._triton import jit, tl

LOG2_E = 1.4426950408889634


@dataclass(slots=True)
class PagedRows:
    """Rows of one attention call. Tensors are on the device; the ints are the host's and may be upper bounds."""

    slots: torch.Tensor  # [num_rows] int32, row of `tables`
    starts: torch.Tensor  # [num_rows] int32, position of the row's first token
    q_starts: torch.Tensor  # [num_rows + 1] int32, the row's first token in q; the last is their number
    tables: torch.Tensor  # [num_slots + 1, max_blocks] int32 block ids, any stride between rows
    num_rows: int
    num_tokens: int
    max_count: int  # most tokens of a row
    max_len: int  # most positions that a row's last token sees


def paged_attention_torch(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    kv: torch.Tensor,  # [2, num_kv_heads, num_blocks, block_size, head_dim]
    rows: PagedRows,
    *,
    scale: float,
    window: int = 0,  # positions that a token sees, itself included; 0: all
    soft_cap: float = 0.0,  # scores become soft_cap * tanh(score / soft_cap); 0: they stay
    out: torch.Tensor | None = None,  # [num_tokens, num_heads * head_dim]
) -> torch.Tensor:
    """[num_tokens, num_heads * head_dim] in q's dtype, computed in fp32 or what is wider; one row after another."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[1], kv.shape[3]
    wide = torch.promote_types(q.dtype, torch.float32)
    result = q.new_empty(num_tokens, num_heads * head_dim) if out is None else out
    edges = rows.q_starts.tolist()
    for row, (slot, start) in enumerate(zip(rows.slots.tolist(), rows.starts.tolist(), strict=True)):
        first, end = edges[row], edges[row + 1]
        length = start + end - first
        blocks = rows.tables[slot, : -(-length // block_size)].long()
        k, v = kv[:, :, blocks].reshape(2, num_kv_heads, -1, head_dim)[:, :, :length].to(wide)
        own = q[first:end].to(wide).view(end - first, num_kv_heads, -1, head_dim)
        scores = torch.einsum("tngd,nsd->ngts", own, k) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        behind = torch.arange(start, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
        hidden = (behind < 0) | (behind >= window) if window else behind < 0
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        result[first:end] = torch.einsum("ngts,nsd->tngd", weights, v).reshape(end - first, -1).to(q.dtype)
    return result


@jit
def find_row(q_starts_ptr, tile, num_rows, TILE_TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """(row, its tile) of the tile-th of num_tokens // TILE_TOKENS + num_rows places for tiles of TILE_TOKENS tokens.

    Row r owns the places from q_starts[r] // TILE_TOKENS + r on: at least as many as it has tiles. A place that is not
    needed has its first token beyond the row's last. ROWS is a power of two, at least num_rows."""
    indices = tl.arange(0, ROWS)
    first = tl.load(q_starts_ptr + indices, mask=indices < num_rows, other=0) // TILE_TOKENS + indices
    row = tl.sum(((first <= tile) & (indices < num_rows)).to(tl.int32), axis=0) - 1
    return row, tile - tl.load(q_starts_ptr + row) // TILE_TOKENS - row


@jit
def attend(
    q,  # [M, D]
    q_positions,  # [M]
    head_ptr,  # k of this kv head; v is v_offset elements further
    table_ptr,  # block ids of this row
    v_offset,  # int64
    begin,  # first position, a multiple of BLOCK_N
    end,  # positions from here on are neither read nor seen
    scale_log2,  # scale * log2(e)
    m,  # [M] highest score so far; scores are in log2 units
    total,  # [M] sum of 2**(score - m)
    acc,  # [M, D] sum of 2**(score - m) * v
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # False: each of q sees all of begin..end, which is a multiple of BLOCK_N
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Online softmax (arXiv 1805.02867, 2205.14135) of q over positions begin..end."""
    offsets = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    for at in range(begin, end, BLOCK_N):
        positions = at + offsets
        inside = positions < end
        if MASKED:
            blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=inside, other=0)
        else:
            blocks = tl.load(table_ptr + positions // BLOCK_SIZE)
        places = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        pointers = head_ptr + (places * HEAD_DIM)[:, None] + dims[None, :]
        if MASKED and HEAD_DIM < BLOCK_D:
            k = tl.load(pointers, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(pointers + v_offset, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        elif MASKED:
            k = tl.load(pointers, mask=inside[:, None], other=0.0)
            v = tl.load(pointers + v_offset, mask=inside[:, None], other=0.0)
        elif HEAD_DIM < BLOCK_D:
            k = tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(pointers + v_offset, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(pointers)
            v = tl.load(pointers + v_offset)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = scores * scale_log2
        if SOFT_CAP > 0:
            scores = _soft_cap(scores, SOFT_CAP)
        if MASKED:
            seen = positions[None, :] <= q_positions[:, None]
            if WINDOW > 0:
                seen &= positions[None, :] > q_positions[:, None] - WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(m, tl.max(scores, axis=1))
        weights = tl.exp2(scores - top[:, None])
        fade = tl.exp2(m - top)
        total = total * fade + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        m = top
    return m, total, acc


@jit
def _soft_cap(scores, CAP: tl.constexpr):
    """CAP * tanh(score / CAP) of scores in log2 units; as 1 - 2 / (e**2x + 1) it cannot overflow."""
    return (1 - 2 / (tl.exp2(scores * (2 / CAP)) + 1)) * (CAP * 1.4426950408889634)
