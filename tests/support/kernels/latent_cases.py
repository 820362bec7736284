"""Inputs of attention over latents for tests."""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.attention.paged_attention import PagedRows
from tests.support.kernels.attention_cases import paged_case


class LatentSizes(NamedTuple):
    """The sizes of a layer."""

    num_heads: int
    rank: int
    rope_dim: int
    nope_dim: int = 12


def latent_case(
    spans: list[tuple[int, int]],
    sizes: LatentSizes,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    padding_rows: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedRows]:
    """(queries over latents, q with its rotary part last, kv, rows) as in `paged_case`; heads of q are strided."""
    heads = sizes.num_heads, 1, sizes.rank + sizes.rope_dim
    whole, kv, rows = paged_case(spans, heads, block_size, dtype, device, padding_rows=padding_rows)
    over_latents = whole[..., : sizes.rank].contiguous()
    q = torch.full((*whole.shape[:2], sizes.nope_dim + sizes.rope_dim), torch.nan, dtype=dtype, device=device)
    q[..., sizes.nope_dim :] = whole[..., sizes.rank :]
    return over_latents, q, kv[:1].contiguous(), rows
