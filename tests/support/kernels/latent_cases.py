"""Inputs of attention over latents for tests, and its check against the twin of paged attention."""

from __future__ import annotations

from typing import NamedTuple

import torch

from runtime.kernels.attention.latent_attention import attend_rows
from runtime.kernels.attention.paged_attention import AttentionForm, PagedRows, paged_attention_torch
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


def check_latents(
    case: tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedRows], sizes: LatentSizes, scale: float = 0.1
) -> None:
    """The kernel against float64, in both modes; every element of the output must be written."""
    over_latents, q, kv, rows = case
    rope = q[..., sizes.nope_dim :]
    wide = torch.cat((over_latents, rope), -1).double()
    want = paged_attention_torch(wide, kv.double().expand(2, *kv.shape[1:]), rows, AttentionForm(scale))
    want = want.view(*wide.shape)[..., : sizes.rank]
    for deterministic in (False, True):
        out = torch.full_like(over_latents, torch.nan)
        attend_rows(over_latents, rope, kv, rows, scale=scale, deterministic=deterministic, out=out)
        error = (out.double() - want).abs().max() / want.abs().max()
        assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[kv.dtype]
