"""Rows of tokens with their keys and values in a paged cache of any form, and the kernel of attention on them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from runtime.base.arrays import Int32s
from runtime.kernels.attention.attention_torch import AttentionShape, attention_torch, plan_attention
from runtime.kernels.attention.paged_attention import AttentionForm
from runtime.kernels.attention.stored_kv import store_kv_torch
from runtime.kernels.attention.tiled_rows import TILE, attention_tiles
from runtime.kernels.cpu.attention.attention import attention
from runtime.kernels.cpu.attention.stored_numbers import KVForm
from runtime.kernels.llvm.compiler import Target
from tests.support.kernels.compiled import call


@dataclass(frozen=True)
class Layer:
    """What a kernel of attention is compiled for."""

    dtype: torch.dtype = torch.float32
    head_dim: int = 64
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 2
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False


@dataclass
class Rows:
    """Rows of `counts` tokens from positions `starts`."""

    layer: Layer
    starts: Int32s
    counts: Int32s
    q: torch.Tensor  # [num_tokens, num_heads, head_dim]
    kv: torch.Tensor
    scales: torch.Tensor | None
    tables: torch.Tensor
    sinks: torch.Tensor | None

    def own(self, row: int, first: int = 0, count: int | None = None) -> Rows:
        """Some tokens of one row, alone."""
        at = int(self.counts[:row].sum()) + first
        count = int(self.counts[row]) - first if count is None else count
        start = np.array([self.starts[row] + first], np.int32)
        q, tables = self.q[at : at + count].contiguous(), self.tables[row : row + 1].contiguous()
        return replace(self, starts=start, counts=np.array([count], np.int32), q=q, tables=tables)

    def attend(
        self, target: Target | None = None, parts: int = 1, tile: int = TILE, by_head: bool = False
    ) -> torch.Tensor:
        """The kernel's output."""
        layer, num_heads = self.layer, self.q.shape[1]
        tiles = torch.from_numpy(attention_tiles(self.starts, self.counts, np.arange(len(self.counts)), tile))
        out = torch.full((len(self.q), num_heads * layer.head_dim), torch.nan)
        positions, per_task = self.kv.shape[2] * self.kv.shape[3], 1 if by_head else layer.group
        sizes = self.q.stride(0), positions, self.tables.stride(0), len(tiles), num_heads, per_task
        tensors = self.q, self.kv, self.scales, self.sinks, self.tables, tiles, out
        call(
            attention, (*tensors, *sizes, layer.head_dim**-0.5),
            target, parts, form=KVForm(layer.dtype, layer.head_dim, layer.block_size), group=layer.group,
            window=layer.window, soft_cap=layer.soft_cap, has_sinks=layer.has_sinks, max_heads=layer.group,
        )  # fmt: skip
        return out

    def expected(self) -> torch.Tensor:
        """`attention_torch` in float64."""
        layer, outs = self.layer, []
        form = AttentionForm(layer.head_dim**-0.5, layer.window, layer.soft_cap, self.sinks)
        shape = AttentionShape(
            self.q.shape[1], layer.num_kv_heads, self.kv.shape[2], layer.block_size, torch.float64,
            torch.device("cpu"), False,
        )  # fmt: skip
        kv = self.kv.nan_to_num() if self.scales is None else self.kv
        for row in range(len(self.counts)):
            own = self.own(row)
            plan = plan_attention(own.tables.numpy(), own.starts, own.counts, shape)
            outs.append(attention_torch(own.q.double(), kv, plan, form, self.scales))
        return torch.cat(outs)


def rows_of(layer: Layer, starts: list[int], counts: list[int], seed: int = 0, spread: bool = False) -> Rows:
    """Rows with random numbers. Memory that no token sees holds NaN, or the largest bytes of an 8-bit type.

    The numbers depend on the seed and not on the layout; blocks are in a random order, with gaps if `spread`."""
    generator = torch.Generator().manual_seed(seed)
    lengths = np.add(starts, counts)
    numbers = torch.randn(int(lengths.sum()), 2 * layer.num_kv_heads, layer.head_dim, generator=generator)
    q = 3 * torch.randn(sum(counts), layer.num_kv_heads * layer.group, layer.head_dim, generator=generator)
    head_scales = torch.rand(2, layer.num_kv_heads, generator=generator) / 50 + 0.005
    sinks = 3 * torch.randn(q.shape[1], generator=generator) if layer.has_sinks else None
    needed = -(-lengths // layer.block_size)
    num_blocks = 1 + int(needed.sum()) * (3 if spread else 1)
    blocks = (torch.randperm(num_blocks - 1, generator=generator) + 1).int()
    tables, index = torch.zeros(len(counts), int(needed.max()), dtype=torch.int32), []
    for row, own in enumerate(blocks[: int(needed.sum())].split(needed.tolist())):
        tables[row, : len(own)] = own
        positions = torch.arange(int(lengths[row]))
        index.append(own.long()[positions // layer.block_size] * layer.block_size + positions % layer.block_size)
    kv = torch.empty(2, layer.num_kv_heads, num_blocks, layer.block_size, layer.head_dim, dtype=layer.dtype)
    kv.view(torch.uint8).fill_(0xFF)
    scales = None
    if layer.dtype == torch.int8:
        scales = torch.full((layer.num_kv_heads, num_blocks, layer.block_size, 2), torch.nan, dtype=torch.float16)
    elif layer.dtype == torch.float8_e4m3fn:
        scales = head_scales
    store_kv_torch(numbers if scales is not None else numbers.to(layer.dtype), kv, scales, torch.cat(index))
    return Rows(layer, np.array(starts, np.int32), np.array(counts, np.int32), q, kv, scales, tables, sinks)
