"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the reference, which is also the path of CPUs.

One layer's cache is kv [1, 1, num_blocks, block_size, rank + rope_dim]. A token's vector is its latent, normed, and its
key's rotary part, which all heads share. Two forms give the same results but for rounding:

- absorbed: W_UK turns each head's q into a query over latents. The latents' weighted sum becomes values by W_UV. A
  step reads only the cache, so this form serves rows with few tokens. In deterministic mode it serves all rows.
- expanded: kv_b makes every head's k and v from the latents. It needs a third to half the multiplications for each
  token pair, so it serves rows with many tokens. Head groups are expanded one after another, within a memory
  bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.kernels.attention.attention_torch import AttentionPlan, Softmax, Span, attend_chunks, joined
from runtime.kernels.linear.linear_torch import Product
from runtime.kernels.norm.rms_norm import rms_norm_torch

_LEAST_EXPANDED = 128  # a row's tokens in the expanded form: with fewer, the expansion costs more than it saves
MAX_EXPANDED = 1 << 24  # k and v elements that are expanded at a time, unless one head has more
_ALIGNED = 16  # floats; MKL's products depend on how their operands are aligned


class LatentForm(NamedTuple):
    """One layer's norm and rotary positions."""

    norm: torch.Tensor  # [rank] weight for the latents' RMS norm
    eps: float
    interleaved: bool  # dimension 2 i is rotated with 2 i + 1, else i with i + rope_dim / 2


class LatentUp(NamedTuple):
    """The map kv_b from latents to keys and values."""

    weight: torch.Tensor  # [num_heads, nope_dim + value_dim, rank]; k's rows first
    nope_dim: int
    # The same as single heads' products: q without positions -> a query over latents, and latents -> values.
    absorb: Sequence[Product] = ()
    values: Sequence[Product] = ()

    @property
    def keys_weight(self) -> torch.Tensor:
        """[num_heads, nope_dim, rank]"""
        return self.weight[:, : self.nope_dim]

    @property
    def values_weight(self) -> torch.Tensor:
        """[num_heads, value_dim, rank]"""
        return self.weight[:, self.nope_dim :]


def latent_up(
    weight: torch.Tensor, nope_dim: int, product: Callable[[torch.Tensor], Product] | None = None
) -> LatentUp:
    """The map kv_b with a weight [num_heads, nope_dim + value_dim, rank]. `latent_attention_exact` needs `product`,
    which makes the product of a weight [out, in]."""
    up = LatentUp(weight, nope_dim)
    if product is None:
        return up
    absorb = [product(head_rows.t().contiguous()) for head_rows in up.keys_weight]
    return up._replace(absorb=absorb, values=[product(head_rows.contiguous()) for head_rows in up.values_weight])


def latent_up_of_maps(
    absorb: torch.Tensor, values: torch.Tensor, num_heads: int, product: Callable[[torch.Tensor], Product] | None = None
) -> LatentUp:
    """`latent_up` from two maps: [num_heads * rank, nope_dim] and [num_heads * value_dim, rank]."""
    keys, own = (weight.view(num_heads, -1, weight.shape[1]) for weight in (absorb, values))
    return latent_up(torch.cat((keys.transpose(1, 2), own), 1), keys.shape[2], product)


def latent_store_torch(
    q: torch.Tensor,  # [num_tokens, num_heads, nope_dim + rope_dim], any stride between tokens; is overwritten
    latents: torch.Tensor,  # [num_tokens, rank + rope_dim], any stride between tokens
    rope: tuple[torch.Tensor, torch.Tensor],  # cos and sin, each [num_tokens, 1, rope_dim], sin's first half negated
    kv: torch.Tensor,  # [1, 1, num_blocks, block_size, rank + rope_dim], one layer's cache
    kv_index: torch.Tensor,  # [num_tokens] block * block_size + offset
    form: LatentForm,
) -> None:
    """Rotate the last numbers of each head's q in place. Norm the latents, rotate their keys, and store both."""
    norm, eps, interleaved = form
    rank, rope_dim = len(norm), rope[0].shape[-1]
    q_rotary, k_rotary = q[..., -rope_dim:], latents[:, rank:].unsqueeze(1)
    q_rotary.copy_(_rotated(q_rotary, rope, interleaved))
    stored = torch.cat((rms_norm_torch(latents[:, :rank], norm, eps), _rotated(k_rotary, rope, interleaved)[:, 0]), 1)
    kv.view(-1, kv.shape[-1]).index_copy_(0, kv_index.long(), stored.to(kv.dtype))


def _rotated(x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], interleaved: bool) -> torch.Tensor:
    """x [num_tokens, heads, rope_dim], rotated."""
    cos, sin = rope
    if not interleaved:
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin
    half = x.shape[-1] // 2
    cos, sin = cos[..., half:], sin[..., half:]  # a pair's; here sin is not negated
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


def latent_attention_torch(
    q: torch.Tensor,  # [num_tokens, num_heads, nope_dim + rope_dim], rotated
    kv: torch.Tensor,  # this step's tokens already in it
    plan: AttentionPlan,
    up: LatentUp,
    scale: float,
    first_key: int = 0,  # first position that any token sees (AttentionForm)
) -> torch.Tensor:
    """[num_tokens, num_heads * value_dim]: softmax(q k^T * scale) v over each token's past and itself."""
    outs = []
    for span in plan.spans:
        own, latents = q[span.start : span.stop], span.view.read_vectors(kv)[0, :, 0, first_key:]
        attend = _expanded if len(own) >= _LEAST_EXPANDED and span.view.num_rows == 1 else _absorbed
        outs.append(attend(own, latents, span, up, scale, first_key))
    return joined(outs, plan, first_key)


def _absorbed(
    q: torch.Tensor,
    latents: torch.Tensor,  # [num_rows, length - first_key, rank + rope_dim]
    span: Span,
    up: LatentUp,
    scale: float,
    first_key: int,
) -> torch.Tensor:
    """Rows with one token each, or one row with many tokens."""
    num_tokens, num_heads, _ = q.shape
    rank = up.weight.shape[2]
    over_latents = torch.cat((torch.einsum("nhd,hdr->nhr", q[..., : up.nope_dim], up.keys_weight),
                              q[..., up.nope_dim :]), -1)  # fmt: skip
    num_rows = len(latents)
    scores = torch.bmm(over_latents.view(num_rows, -1, over_latents.shape[-1]), latents.transpose(1, 2)).mul_(scale)
    if num_rows > 1:
        assert span.mask is not None, "rows of one token have a mask"
        scores += span.mask.view(num_rows, num_heads, -1)[..., first_key:]
    elif num_tokens > 1:
        scores.view(num_tokens, num_heads, -1).masked_fill_(span.hidden(0)[:, None, first_key:], -math.inf)
    mixed = torch.bmm(scores.softmax(-1), latents[..., :rank]).view(num_tokens, num_heads, rank)
    return torch.einsum("nhr,hdr->nhd", mixed, up.values_weight).flatten(1)


def _expanded(
    q: torch.Tensor, latents: torch.Tensor, span: Span, up: LatentUp, scale: float, first_key: int
) -> torch.Tensor:
    """One row of many tokens."""
    num_tokens, num_heads, head_dim = q.shape
    (_, head_rows, rank), (_, length, _) = up.weight.shape, latents.shape
    together = max(1, MAX_EXPANDED // (length * (head_rows + head_dim)))
    mask, causal = span.mask_within(0, q.dtype, first_key=first_key)
    outs = []
    for first in range(0, num_heads, together):
        weight = up.weight[first : first + together]
        k_and_v = torch.matmul(latents[0, :, :rank], weight.transpose(1, 2))  # [heads, length, nope_dim + value_dim]
        shared = latents[:, :, rank:].expand(len(weight), -1, -1)
        k, v = torch.cat((k_and_v[..., : up.nope_dim], shared), -1), k_and_v[..., up.nope_dim :]
        own = q[:, first : first + together].transpose(0, 1)
        out = F.scaled_dot_product_attention(own[None], k[None], v[None], attn_mask=mask, is_causal=causal, scale=scale)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs, 1).reshape(num_tokens, -1)


def latent_attention_exact(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: AttentionPlan,
    up: LatentUp,
    scale: float,
    first_key: int = 0,
    *,
    by_head: bool = False,  # a head's bits do not depend on the other heads here, either
) -> torch.Tensor:
    """`latent_attention_torch` for `EngineConfig.deterministic`, always in the absorbed form (`attention_exact`)."""
    num_tokens, rank = len(q), up.weight.shape[2]
    heads = [product(q[:, h, : up.nope_dim].contiguous()) for h, product in enumerate(up.absorb)]
    over_latents = torch.cat((torch.stack(heads, 1), q[..., up.nope_dim :]), -1).float() * scale
    pad, softmax = (0, -over_latents.shape[-1] % _ALIGNED), Softmax(first_key > 0, 0.0, by_head, None)
    outs = []
    for span in plan.spans:
        rows = F.pad(over_latents[span.start : span.stop], pad)
        k = F.pad(span.view.read_vectors(kv)[0, :, 0].float(), pad)  # a copy
        k[:, :first_key] = 0
        v = k[..., :rank].contiguous()
        k, v = (x.expand(len(rows), -1, -1) for x in (k, v))
        outs.append(attend_chunks(rows, k, v, span.seen(0, first_key=first_key), softmax))
    mixed = torch.cat(outs).to(q.dtype)
    values = [product(mixed[:, h].contiguous()) for h, product in enumerate(up.values)]
    return torch.stack(values, 1).view(num_tokens, -1)
