"""Attention over the paged cache of keys and values: softmax(q k^T * scale) v.

A tile is up to LANES neighbouring tokens in one row. Its queries read each chunk of keys and values while it is in the
L1 cache. The same operations compute a query in any tile: an online softmax (arXiv 1805.02867) over chunks of CHUNK
absolute positions. It begins at the first chunk with a visible position. Hidden positions are skipped, or their weight
is 0 and their products are dropped. A token's bits therefore depend only on its own q and the keys and values that it
sees. A sink is the first score, with zeros as its value. A token that sees nothing gets zeros.

Tokens see the positions up to their own. An image's tokens may see all of the image, which the row contains."""

from __future__ import annotations

from typing import NamedTuple

from runtime.kernels.cpu.attention.attention_lanes import Lanes
from runtime.kernels.cpu.attention.attention_rows import Rows, Tile
from runtime.kernels.cpu.attention.kv_chunk import CHUNK, Bounds, Chunk, seen_positions
from runtime.kernels.cpu.attention.stored_numbers import KVForm
from runtime.kernels.llvm.compiler import Target
from runtime.kernels.llvm.language import F32s, Float, I32s, Int, U8s, i64, loop, maximum, share, when

_MOST_HEADS = 16  # heads in a task: its queries lie on the stack
_FEW = 7  # tokens in a tile, up to which element vectors are faster than token vectors


class AttentionArguments(NamedTuple):
    """What `attention` reads and writes."""

    q: F32s  # [num_tokens, num_heads, head_dim], rows q_stride apart
    kv: U8s  # [2, num_kv_heads, num_positions, head_dim] of form.type
    scales: F32s  # the cache's scales, if it is quantized
    sinks: F32s  # [num_heads], read if has_sinks
    tables: I32s  # [rows, table_stride] each row's blocks
    tiles: I32s  # [num_tiles, 4]: first token, number of tokens, table row, the first token's position
    last_visible: I32s  # [num_tokens] the last position that each token sees, rising; read if has_images
    out: F32s  # [num_tokens, num_heads * head_dim]
    q_stride: Int
    num_positions: Int  # positions in a head's cache
    table_stride: Int
    num_tiles: Int
    num_heads: Int
    heads_per_task: Int  # query heads per kv head: 1 or `heads_of_task`
    scale: Float  # scores' scale


def attention(
    given: AttentionArguments,
    part: Int,
    parts: Int,
    target: Target,
    form: KVForm,
    group: int,  # query heads per kv head
    window: int,  # positions that a token sees, itself included; 0 for all
    first_key: int,  # first position that any token sees
    soft_cap: float,  # 0 for none
    has_sinks: bool,
    has_images: bool,  # tokens see up to last_visible
    max_heads: int,  # heads_per_task or more
) -> None:
    """Part i/n: a share of the pairs (head group, tile)."""
    begin, end = share(given.num_heads // given.heads_per_task * given.num_tiles, part, parts)
    chunk = Chunk(form, given.kv, given.scales, given.num_heads // group, given.num_positions)
    bounds = Bounds(window, first_key)
    rows = Rows(form, bounds, soft_cap, _FEW * max_heads)
    together = _heads_of_products(group)
    lanes = Lanes(form, bounds, soft_cap, max(max_heads, together), together, target, has_images)
    for task in loop(begin, end):
        head = task // given.num_tiles * given.heads_per_task
        numbers = given.tiles + task % given.num_tiles * 4
        token, count, row, position = (numbers.load(i).to(i64) for i in range(4))
        head_scale = given.scale * chunk.open(head // group, given.tables + row * given.table_stride)
        own, out_stride = head * form.head_dim, given.num_heads * form.head_dim
        first_q, first_out = given.q + (token * given.q_stride + own), given.out + (token * out_stride + own)
        first = maximum(position - (window - 1), 0) // CHUNK if window else 0
        for is_fit, queries, heads in (
            (count <= _FEW, rows, given.heads_per_task),
            ((count > _FEW) & (head % together).equals(0), lanes, maximum(given.heads_per_task, together)),
        ):
            with when(is_fit):
                last = given.last_visible + token if has_images else None
                tile = Tile(first_q, given.q_stride, first_out, out_stride, position, count, heads, last)
                queries.open(tile, head_scale, given.sinks + head if has_sinks else None)
                stop = tile.end_seen(count - 1)
                for index in loop(first, (stop - 1) // CHUNK + 1):
                    base = index * CHUNK
                    chunk.read(base, *seen_positions(base, position, stop, bounds))
                    queries.attend(base, chunk)
                queries.finish(chunk.value_scale)


def _heads_of_products(group: int) -> int:
    """The query heads that are computed together in a tile with many tokens."""
    return max(n for n in (1, 2, 3, 4) if group % n == 0)


def heads_of_task(group: int) -> int:
    """The most query heads that a task should have, if a kv head has `group`."""
    unit = _heads_of_products(group)
    return max(n for n in range(unit, max(unit, _MOST_HEADS) + 1, unit) if group % n == 0)
