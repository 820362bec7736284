"""Attention over latents in the expanded form on a GPU, for rows with many tokens in launched steps.

A copy of the rows' latents becomes some heads' keys and values, in blocks as in a cache. Attention over prompts reads
them. Other heads follow in the same memory. Captured launches do not know their rows' lengths, so they use the
absorbed form."""

from __future__ import annotations

from dataclasses import replace

import torch

from runtime.kernels.attention.latent_heads import head_product_triton
from runtime.kernels.attention.latent_torch import LatentUp
from runtime.kernels.attention.paged_attention import AttentionForm, PagedRows
from runtime.kernels.attention.prefill_attention import prefill_attention

_LEAST_TOKENS = 512  # a row's tokens on average: with fewer, the expansion costs more than it saves
MOST_EXPANDED = 1 << 26  # elements of k, v and copied latents that exist at a time


def can_expand(q: torch.Tensor, kv: torch.Tensor, rows: PagedRows, num_tokens: int, up: LatentUp) -> bool:
    """True if the rows have enough tokens, and their latents and the keys of a head fit into the memory for them."""
    if num_tokens < _LEAST_TOKENS * rows.num_rows or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    fits = _num_positions(rows, kv.shape[3]) * max(q.shape[2], kv.shape[4]) <= MOST_EXPANDED
    return fits and up.weight.shape[1] - up.nope_dim <= q.shape[2]


def _num_positions(rows: PagedRows, block_size: int) -> int:
    return rows.num_rows * -(-rows.max_len // block_size) * block_size


def attend_expanded(
    q: torch.Tensor,  # [num_tokens, num_heads, nope_dim + rope_dim], heads contiguous, tokens at any stride
    kv: torch.Tensor,  # [1, 1, num_blocks, block_size, rank + rope_dim] contiguous
    rows: PagedRows,  # their tokens are the last ones of q
    up: LatentUp,
    first: int,  # the rows' first token
    *,
    form: AttentionForm,
    out: torch.Tensor,  # [num_tokens, num_heads, value_dim] contiguous; written from `first` on
) -> None:
    """`latent_attention_torch` for these rows."""
    (_, num_heads, head_dim), block_size, (_, head_rows, rank) = q.shape, kv.shape[3], up.weight.shape
    num_blocks, nope_dim, value_dim = -(-rows.max_len // block_size), up.nope_dim, head_rows - up.nope_dim
    latents, own_rows = _gathered(kv, rows, num_blocks)
    together = min(num_heads, MOST_EXPANDED // (len(latents) * head_dim))
    both = q.new_empty((2, together, rows.num_rows * num_blocks, block_size, head_dim))
    for head in range(0, num_heads, together):
        weight = up.weight[head : head + together]
        own = both[:, : len(weight)]
        k, v = own.flatten(2, 3).transpose(1, 2)  # [positions, heads, head_dim]
        shared = latents[:, None, :rank].expand(-1, len(weight), -1)
        head_product_triton(shared, weight[:, :nope_dim].transpose(1, 2), out=k[..., :nope_dim])
        head_product_triton(shared, weight[:, nope_dim:].transpose(1, 2), out=v[..., :value_dim])
        k[..., nope_dim:] = latents[:, None, rank:]
        mixed = prefill_attention(q[:, head : head + together], own, own_rows, form)
        mixed = mixed.view(len(q), len(weight), head_dim)[first:, :, :value_dim]
        out[first:, head : head + together] = mixed


def _gathered(kv: torch.Tensor, rows: PagedRows, num_blocks: int) -> tuple[torch.Tensor, PagedRows]:
    """The vectors of all rows' blocks, [positions, rank + rope_dim], and the rows with blocks of this copy."""
    device, num_rows, block_size = kv.device, rows.num_rows, kv.shape[3]
    ends = rows.starts + rows.q_starts[1:] - rows.q_starts[:-1]
    is_used = torch.arange(num_blocks, device=device) * block_size < ends[:, None]  # other entries may be anything
    blocks = rows.tables[:, :num_blocks].index_select(0, rows.slots).masked_fill_(~is_used, 0)
    vectors = kv[0, 0].index_select(0, blocks.flatten()).flatten(0, 1)
    tables = torch.arange(num_rows * num_blocks, dtype=torch.int32, device=device).view(num_rows, num_blocks)
    slots = torch.arange(num_rows, dtype=torch.int32, device=device)
    return vectors, replace(rows, slots=slots, tables=tables)
