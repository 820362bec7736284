"""Attention of rows of many tokens (prompts, chunks of them behind a cached prefix) over the paged cache.

A program takes a tile of consecutive tokens with all query heads of one kv head, so each key and value it reads serves
them all. It walks over the row's positions: those that all its tokens see need no mask, the last few do. Places in the
grid run from the last tile of the last row to the first of the first: the longest walks start first.
"""

from __future__ import annotations

import torch

from runtime.kernels._triton import ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl
from runtime.kernels.decode_attention import decode_attention
from runtime.kernels.paged_attention import LOG2_E, PagedRows, attend_range, find_row, rows_searched, token_scales
from runtime.kernels.stored_kv import finish_total, prepare_q, scaling


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _prefill_attention_kernel(
    q_ptr,  # [num_tokens, num_heads, HEAD_DIM], tokens q_stride apart
    kv_ptr,  # [2, num_kv_heads, num_blocks, BLOCK_SIZE, HEAD_DIM] contiguous
    scales_ptr,  # of its codes (stored_kv.py), contiguous; not used without SCALES
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM] contiguous
    slots_ptr,
    starts_ptr,
    q_starts_ptr,
    tables_ptr,
    q_stride,
    kv_stride,  # elements between k and v
    head_stride,  # elements between kv heads
    table_stride,
    num_rows,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a kv head
    TILE_TOKENS: tl.constexpr,  # BLOCK_M // GROUP
    NUM_ROWS: tl.constexpr,  # power of two, at least num_rows
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SCALES: tl.constexpr,  # none | head | token
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, tile = NUM_KV_HEADS - 1 - place % NUM_KV_HEADS, place // NUM_KV_HEADS
    row, row_tile = find_row(q_starts_ptr, tile, num_rows, TILE_TOKENS, NUM_ROWS)
    q_start = tl.load(q_starts_ptr + row) + row_tile * TILE_TOKENS
    count = tl.minimum(tl.load(q_starts_ptr + row + 1) - q_start, TILE_TOKENS)
    start = tl.load(starts_ptr + row) + row_tile * TILE_TOKENS  # position of the tile's first token
    table_ptr = tables_ptr + tl.load(slots_ptr + row).to(tl.int64) * table_stride
    if PDL:  # rows and tables are older than the launch before this one, which has waited before it let this one start
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count <= 0:
        return

    lanes = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_positions = start + lanes // GROUP
    heads = kv_head * GROUP + lanes % GROUP
    whole = (lanes < count * GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_tokens = (q_start + lanes // GROUP).to(tl.int64)
    q = tl.load(q_ptr + (q_tokens * q_stride + heads * HEAD_DIM)[:, None] + dims[None, :], mask=whole, other=0.0)
    if SCALES != "none":
        q = prepare_q(q, scales_ptr, kv_head, scale_log2, SCALES)
        scale_log2 = 1.0
    m = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    begin = 0
    seen_by_all = (start + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        begin = tl.maximum(start - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        seen_by_all = begin  # windows are masked throughout
    k_ptr = kv_ptr + kv_head.to(tl.int64) * head_stride
    token_scales_ptr = token_scales(scales_ptr, kv_head, head_stride, HEAD_DIM, SCALES)
    m, total, acc = attend_range(
        q, q_positions, k_ptr, kv_stride, token_scales_ptr, table_ptr, begin, seen_by_all,
        m, total, acc, scale_log2, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, False, 0, SOFT_CAP, SCALES,
    )  # fmt: skip
    m, total, acc = attend_range(
        q, q_positions, k_ptr, kv_stride, token_scales_ptr, table_ptr, seen_by_all, start + count,
        m, total, acc, scale_log2, BLOCK_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N, True, WINDOW, SOFT_CAP, SCALES,
    )  # fmt: skip
    total = finish_total(total, scales_ptr, kv_head, NUM_KV_HEADS, SCALES)
    out_at = out_ptr + (q_tokens * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=whole)


def prefill_attention(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim], heads contiguous, tokens at any stride
    kv: torch.Tensor,  # [2, num_kv_heads, num_blocks, block_size, head_dim] contiguous
    rows: PagedRows,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    scales: torch.Tensor | None = None,  # of the cache's codes (stored_kv.py)
    deterministic: bool = False,
    out: torch.Tensor | None = None,  # [num_tokens, num_heads * head_dim] contiguous
) -> torch.Tensor:
    """`paged_attention_torch` for rows of any number of tokens."""
    if deterministic:
        return decode_attention(
            q, kv, rows, scale=scale, window=window, soft_cap=soft_cap, scales=scales, deterministic=True, out=out
        )
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[1], kv.shape[3]
    if out is None:
        out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    if not num_tokens:
        return out
    group = num_heads // num_kv_heads
    block_d = next_power_of_2(head_dim)
    block_m, block_n, options = _tile(block_d, q.dtype, min(rows.num_tokens, rows.max_len), scaling(scales))
    block_m = max(block_m, next_power_of_2(group))
    tile_tokens = block_m // group
    pdl = use_pdl(q)
    # One dimension of the grid: the others hold no more than 65,535 places each.
    _prefill_attention_kernel[(num_kv_heads * (rows.num_tokens // tile_tokens + rows.num_rows),)](
        q, kv, kv if scales is None else scales, out, rows.slots, rows.starts, rows.q_starts, rows.tables,
        q.stride(0), kv.stride(0), kv.stride(1), rows.tables.stride(0), rows.num_rows, scale * LOG2_E,
        BLOCK_SIZE=block_size, HEAD_DIM=head_dim, NUM_KV_HEADS=num_kv_heads, GROUP=group, TILE_TOKENS=tile_tokens,
        NUM_ROWS=rows_searched(rows.num_rows), WINDOW=window, SOFT_CAP=soft_cap, SCALES=scaling(scales),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d,
        PDL=pdl, **options, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


def _tile(block_d: int, dtype: torch.dtype, most: int, scales: str) -> tuple[int, int, dict[str, int]]:
    """(rows of q, positions, launch options), as measured on an H200, for `most` tokens or positions. Two programs on
    an SM take turns at the tensor cores; at head_dim 128 that needs a limit on registers, which costs a few spills
    outside of the loops."""
    short = most <= 1024
    if dtype == torch.float32:  # no matrix instruction multiplies fp32: small tiles, for exactness rather than speed
        return 32, 32, {"num_warps": 4, "num_stages": 1}
    if block_d > 128:
        return (64, 32, {"num_warps": 4, "num_stages": 3}) if short else (128, 64, {"num_warps": 8, "num_stages": 2})
    if block_d == 128 and scales == "token":
        return 64, 128, {"num_warps": 4, "num_stages": 2}
    if block_d == 128 and scales == "head" and not short:
        return 128, 128, {"num_warps": 8, "num_stages": 2}
    if block_d == 128 and short:
        return 64, 64, {"num_warps": 4, "num_stages": 3}
    return 128, 64, {"num_warps": 8, "num_stages": 3} | ({"maxnreg": 128} if block_d == 128 else {})
