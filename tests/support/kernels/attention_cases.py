"""Inputs of paged attention for tests: rows anywhere in a poisoned cache."""

from __future__ import annotations

import numpy as np
import torch

from runtime.kernels.attention.paged_attention import PagedRows
from runtime.kernels.attention.stored_kv import store_kv_torch


def paged_case(
    spans: list[tuple[int, int]],  # (start, count) of each row
    heads: tuple[int, int, int] = (4, 2, 64),  # query heads, kv heads, head_dim
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    padding_rows: int = 0,  # after the others, as in a graph: one token, position 0, the null block
) -> tuple[torch.Tensor, torch.Tensor, PagedRows]:
    """(q, kv, rows): blocks in random order, NaN at every position that no row has, q and tables strided."""
    rng, generator = np.random.default_rng(seed), torch.Generator(device).manual_seed(seed)
    num_heads, num_kv_heads, head_dim = heads
    needed = [-(-(start + count) // block_size) for start, count in spans]
    num_blocks = 1 + sum(needed)
    kv = torch.full((2, num_kv_heads, num_blocks, block_size, head_dim), torch.nan, dtype=dtype, device=device)
    kv[:, :, 0, 0] = 1
    state = np.full((len(spans) + 3, max(needed) + 7), 1 << 30, np.int32)  # an entry without an owner would fault
    state[-1] = 0
    slots = rng.permutation(len(spans) + 2)[: len(spans)]
    free = rng.permutation(np.arange(1, num_blocks))
    for slot, (start, count), blocks in zip(slots, spans, np.split(free, np.cumsum(needed)[:-1]), strict=True):
        state[slot, 5 : 5 + len(blocks)] = blocks
        shape = (2, num_kv_heads, len(blocks) * block_size, head_dim)
        values = torch.randn(shape, generator=generator, device=device).to(dtype)
        values[:, :, start + count :] = torch.nan
        index = torch.from_numpy(blocks).to(device)
        kv[:, :, index] = values.view(2, num_kv_heads, len(blocks), block_size, head_dim)
    spans = spans + [(0, 1)] * padding_rows
    slots = np.append(slots, [len(state) - 1] * padding_rows)
    starts, counts = np.array(spans, np.int32).T
    q_starts = np.append(0, np.cumsum(counts))
    num_tokens = int(q_starts[-1])
    q = torch.randn(num_tokens, num_heads + 2, head_dim, generator=generator, device=device).to(dtype)[:, :num_heads]
    rows = PagedRows(
        *(torch.from_numpy(x.astype(np.int32)).to(device) for x in (slots, starts, q_starts)),
        torch.from_numpy(state).to(device)[:, 5:], len(spans), num_tokens, int(counts.max()),
        int((starts + counts).max()),
    )  # fmt: skip
    return q, kv, rows


def sinks_of(num_heads: int, device: str = "cpu") -> torch.Tensor:
    """Sinks from far below the scores to far above them."""
    return torch.linspace(-20.0, 9.0, num_heads, device=device)


def rows_of(rows: PagedRows, spans: list[tuple[int, int]]) -> tuple[list[int], PagedRows]:
    """Spans (start, count) of the one sequence that `rows` holds, each as a row, and the positions of their tokens."""
    starts, counts = np.array(spans, np.int32).T
    device = rows.slots.device
    part = PagedRows(
        rows.slots.expand(len(spans)).contiguous(), torch.from_numpy(starts.copy()).to(device),
        torch.from_numpy(np.append(0, np.cumsum(counts)).astype(np.int32)).to(device), rows.tables, len(spans),
        int(counts.sum()), int(counts.max()), int((starts + counts).max()),
    )  # fmt: skip
    return [t for start, count in spans for t in range(start, start + count)], part


def without_hidden(kv: torch.Tensor, rows: PagedRows, window: int, first_key: int = 0) -> torch.Tensor:
    """A cache with NaN in the blocks below the rows' windows and, below `first_key`, in each row's first block."""
    if not window and not first_key:
        return kv
    kv, size = kv.clone(), kv.shape[3]
    for slot, start in zip(rows.slots.tolist(), rows.starts.tolist(), strict=True):
        dead = rows.tables[slot, : max(0, start - window + 1) // size if window else 0].long()
        kv[:, :, dead] = torch.nan
        kv[:, :, rows.tables[slot, :1].long(), :first_key] = torch.nan
    return kv


def every_fp8() -> torch.Tensor:
    """All codes of e4m3, two of them NaN."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


def encoded(kind: str, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's cache as fp8 or int8: (codes, scales)."""
    heads = kv.shape[1]
    if kind == "fp8":
        codes = torch.zeros_like(kv, dtype=torch.float8_e4m3fn)
        scales = torch.linspace(0.01, 0.1, 2 * heads, device=kv.device).view(2, heads)
    else:
        codes = torch.zeros_like(kv, dtype=torch.int8)
        scales = torch.zeros((*kv.shape[1:-1], 2), dtype=torch.float16, device=kv.device)
    tokens = kv.view(2 * heads, -1, kv.shape[-1]).transpose(0, 1)
    store_kv_torch(tokens, codes, scales, torch.arange(len(tokens), device=kv.device))
    return codes, scales
