"""Attention over the paged KV cache.

One layer's cache is kv [2, num_kv_heads, num_blocks, block_size, head_dim]. The k of one head is contiguous within a
block and across neighbouring blocks, and so is v. `plan_attention` turns a step's block tables into gather indices once
for all layers. A gather reads tiles of gcd(block_size, 64) positions. In the contiguous layout a block is as long as
the context, and a row then reads only what it needs.

Rows of one token (decode) are padded and attend together; longer rows (prefill chunks) attend one by one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from runtime.base.arrays import Int32s
from runtime.kernels.attention.paged_attention import AttentionForm
from runtime.kernels.attention.stored_kv import dequantize_kv

MAX_GATHERED = 1 << 15  # positions that decode rows gather in one call, unless one row has more
_MAX_SCORES = 1 << 22  # scores that attention with a soft cap or sinks holds at a time
_CHUNK = 64  # positions in one fixed-shape piece of `attention_exact`
_LOWEST = -1e30  # lower than all scores, yet finite: a window may hide a whole chunk
_ALIGNED = 16  # floats; MKL's products depend on how their operands are aligned, so `attention_exact` pads head_dim


@dataclass(slots=True)
class KVView:
    """The place of a span's keys and values: cache tile indices, or where one run of positions starts."""

    num_rows: int
    length: int  # positions, the same for all rows
    tiles: torch.Tensor | None  # [2 * num_rows * num_kv_heads * num_tiles] int64 tile index, in that order
    run: int  # first position of the run, if tiles is None
    tile_size: int  # positions

    def read(self, kv: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """[2, num_rows, num_kv_heads, length, head_dim]: a view or a gathered copy; float32 from a quantized cache."""
        stored = self._read(kv, 2)
        if scales is None:
            return stored
        return dequantize_kv(stored, scales if scales.dim() == 2 else self._read(scales[None], 1)[0])

    def read_vectors(self, kv: torch.Tensor) -> torch.Tensor:
        """[1, num_rows, num_kv_heads, length, size] of a cache with one vector for each token and head."""
        return self._read(kv, 1)

    def _read(self, blocks: torch.Tensor, count: int) -> torch.Tensor:
        """Read blocks [count, num_kv_heads, num_blocks, block_size, size]; count is 1 or 2."""
        num_kv_heads, size, start = blocks.shape[1], blocks.shape[4], blocks.storage_offset()
        if self.tiles is None:
            strides = blocks.stride(0), blocks.stride(0), blocks.stride(1), size, 1
            shape = count, 1, num_kv_heads, self.length, size
            return blocks.as_strided(shape, strides, start + self.run * size)
        tiles, tile = self.tiles[: len(self.tiles) * count // 2], self.tile_size * size
        end = 1 + sum((n - 1) * stride for n, stride in zip(blocks.shape, blocks.stride(), strict=True))
        gathered = blocks.as_strided((end // tile, tile), (tile, 1), start).index_select(0, tiles)
        return gathered.view(count, self.num_rows, num_kv_heads, -1, size)[:, :, :, : self.length]


@dataclass(slots=True)
class Span:
    """Tokens that attend in one call: many rows with one token each, or one row with many tokens."""

    start: int  # its tokens in the step
    stop: int
    view: KVView
    mask: torch.Tensor | None  # added to the scores; None without a mask
    causal: bool  # one row from position 0: causal without a mask
    lengths: torch.Tensor  # [num_tokens] int32, positions that each token sees: all before it and itself
    ends: torch.Tensor | None = None  # [num_tokens] like `lengths` for layers with whole images; None if equal
    windowed: tuple[int, bool, torch.Tensor] | None = None  # (window, whole images, mask) of the last layer with one

    def seen_end(self, whole_images: bool = False) -> torch.Tensor:
        """[num_tokens] int32: the position behind the last one that each token sees."""
        return self.ends if whole_images and self.ends is not None else self.lengths

    def seen(self, window: int, whole_images: bool = False, first_key: int = 0) -> torch.Tensor:
        """[num_tokens, 2] int32: the first position that each token sees, below the end, and the end."""
        ends = self.seen_end(whole_images)
        first = (self.lengths - (window or self.view.length)).clamp(min=first_key)
        return torch.stack((torch.minimum(first, ends - 1), ends), 1)

    def hidden(self, window: int, whole_images: bool = False) -> torch.Tensor:
        """[num_tokens, length] bool: positions that a token does not see; `window` 0 means no window."""
        positions = torch.arange(self.view.length, device=self.lengths.device)
        seen = self.seen(window, whole_images)
        hidden = positions >= seen[:, 1:]
        return hidden | (positions < seen[:, :1]) if window else hidden

    def mask_within(
        self, window: int, dtype: torch.dtype, whole_images: bool = False, first_key: int = 0
    ) -> tuple[torch.Tensor | None, bool]:
        """(mask, causal) for a layer with this window. The mask begins at `first_key`."""
        whole_images = whole_images and self.ends is not None
        if not whole_images and (not window or window >= self.view.length) and not (first_key and self.causal):
            return self.mask if self.mask is None else self.mask[..., first_key:], self.causal
        if self.windowed is None or self.windowed[:2] != (window, whole_images):
            hidden = self.hidden(window, whole_images)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)
            if self.view.num_rows > 1:
                assert self.mask is not None, "rows of one token have a mask"
                shape = self.mask.shape
                mask = mask[:, None, None].expand(-1, shape[0] // len(mask), shape[1], -1).reshape(shape)
            self.windowed = window, whole_images, mask
        return self.windowed[2][..., first_key:], False


@dataclass(slots=True)
class AttentionPlan:
    """One step's spans; they cover its tokens in order."""

    num_tokens: int
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The model's heads and the cache's geometry, on which a plan depends."""

    num_heads: int
    num_kv_heads: int
    blocks_apart: int  # distance between two heads' first blocks
    block_size: int
    dtype: torch.dtype
    device: torch.device
    exact: bool  # plan for `attention_exact`


def plan_attention(
    tables: Int32s,  # [num_rows, max_blocks] block ids; unused entries are 0, the null block
    starts: Int32s,  # [num_rows] position of each row's first token
    counts: Int32s,  # [num_rows] each row's tokens; one-token rows first, by rising `decode_bucket`
    shape: AttentionShape,
    last_visible: Int32s
    | None = None,  # [num_tokens] the last position that each token sees in layers with whole images
) -> AttentionPlan:
    """The spans of a step; its tokens lie row after row."""
    num_decode = int((counts == 1).sum())
    buckets = decode_bucket(starts[:num_decode])
    edges = [0, *(np.flatnonzero(np.diff(buckets)) + 1).tolist(), num_decode] if num_decode else []
    spans = []
    for first, end in itertools.pairwise(edges):
        most = max(1, MAX_GATHERED >> int(buckets[first]))
        for a in range(first, end, most):
            b = min(a + most, end)
            spans.append(_decode_span(a, b, tables[a:b], starts[a:b], shape))
    at = num_decode
    for row in range(num_decode, len(counts)):
        count = int(counts[row])
        spans.append(_prefill_span(at, count, tables[row : row + 1], int(starts[row]), shape))
        if last_visible is not None:
            spans[-1].ends = torch.from_numpy(last_visible[at : at + count] + 1).to(shape.device)
        at += count
    return AttentionPlan(at, spans)


def decode_bucket(starts: Int32s) -> NDArray[np.int64]:
    """Rows of a bucket attend together. Padding at most doubles their work; up to 256 positions share one bucket."""
    return np.ceil(np.log2(np.maximum(starts + 1, 256))).astype(np.int64)


def _decode_span(start: int, stop: int, tables: Int32s, starts: Int32s, shape: AttentionShape) -> Span:
    lengths = starts + 1
    view = _kv_view(tables, int(lengths.max()), shape)
    mask = None
    if len(starts) > 1 and not shape.exact:
        keep = np.arange(view.length, dtype=np.int32) < lengths[:, None]
        bias = torch.from_numpy(np.where(keep, np.float32(0), np.float32(-np.inf))).to(shape.device, shape.dtype)
        group = shape.num_heads // shape.num_kv_heads
        mask = bias[:, None, None].expand(-1, shape.num_kv_heads, group, -1).reshape(-1, group, view.length)
    return Span(start, stop, view, mask, False, torch.from_numpy(lengths).to(shape.device))


def _prefill_span(at: int, count: int, table: Int32s, start: int, shape: AttentionShape) -> Span:
    view = _kv_view(table, start + count, shape)
    lengths = torch.arange(start + 1, start + count + 1, dtype=torch.int32, device=shape.device)
    mask = None
    if start and not shape.exact:
        seen = torch.arange(view.length, device=shape.device) < lengths[:, None]
        mask = torch.zeros(seen.shape, dtype=shape.dtype, device=shape.device).masked_fill_(~seen, -math.inf)
    return Span(at, at + count, view, mask, start == 0, lengths)


def _kv_view(tables: Int32s, length: int, shape: AttentionShape) -> KVView:
    """Tiles that cover `length` positions of each row; for exact attention, whole chunks."""
    num_rows = len(tables)
    tile_size = math.gcd(shape.block_size, _CHUNK)
    tiles_per_block = shape.block_size // tile_size
    blocks = tables[:, : -(-length // shape.block_size)]
    if num_rows == 1 and not shape.exact and (blocks[0, 1:] == blocks[0, :-1] + 1).all():
        return KVView(1, length, None, int(blocks[0, 0]) * shape.block_size, tile_size)
    span = -(-length // _CHUNK) * _CHUNK if shape.exact else length
    index = np.arange(-(-span // tile_size))
    block_of = index // tiles_per_block
    table = np.zeros((num_rows, int(block_of[-1]) + 1), np.int64)  # a chunk reads the null block beyond the table
    table[:, : blocks.shape[1]] = blocks
    tiles = table[:, block_of] * tiles_per_block + index % tiles_per_block  # [num_rows, num_tiles]
    heads = np.arange(2 * shape.num_kv_heads).reshape(2, 1, -1, 1) * (shape.blocks_apart * tiles_per_block)
    flat = torch.from_numpy((heads + tiles[None, :, None, :]).reshape(-1)).to(shape.device)
    return KVView(num_rows, span if shape.exact or num_rows == 1 else len(index) * tile_size, flat, 0, tile_size)


def attention_torch(
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    kv: torch.Tensor,  # [2, num_kv_heads, num_blocks, block_size, head_dim], this step's k and v already in it
    plan: AttentionPlan,
    form: AttentionForm,
    scales: torch.Tensor | None = None,  # a quantized cache's scales (stored_kv.py)
) -> torch.Tensor:
    """[num_tokens, num_heads * head_dim]: softmax(q k^T * scale) v over each token's past and itself."""
    outs, (scale, window, soft_cap, sinks, whole_images, first_key) = [], form
    for span in plan.spans:
        own, (k, v) = q[span.start : span.stop], span.view.read(kv, scales).to(q.dtype)[..., first_key:, :].unbind(0)
        if soft_cap or sinks is not None:
            step = len(own) if len(k) > 1 else max(1, _MAX_SCORES // max(1, own.shape[1] * k.shape[2]))
            all_hidden = span.hidden(window, whole_images)[:, first_key:]
            for part, hidden in zip(own.split(step), all_hidden.split(step), strict=True):
                outs.append(_attend_plainly(part, hidden, k, v, scale, soft_cap, sinks))
        else:
            outs.append(_attend(own, *span.mask_within(window, q.dtype, whole_images, first_key), k, v, scale))
    return joined(outs, plan, first_key, whole_images)


def joined(outs: list[torch.Tensor], plan: AttentionPlan, first_key: int, whole_images: bool = False) -> torch.Tensor:
    """The spans' results as one tensor, with zeros for tokens that see nothing."""
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    if first_key:
        ends = torch.cat([span.seen_end(whole_images) for span in plan.spans])
        out.masked_fill_((ends <= first_key)[:, None], 0.0)
    return out


def _attend(
    q: torch.Tensor, mask: torch.Tensor | None, causal: bool, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = q.shape
    num_rows, num_kv_heads, length, _ = k.shape
    group = num_heads // num_kv_heads
    if num_rows > 1:  # a kv head's query heads are the rows of one product; faster here than SDPA
        assert mask is not None, "rows of one token have a mask"
        q = q.reshape(-1, group, head_dim)
        scores = torch.baddbmm(mask, q, k.view(-1, length, head_dim).transpose(1, 2), alpha=scale)
        return torch.bmm(scores.softmax(-1), v.view(-1, length, head_dim)).view(num_rows, -1)
    if num_tokens == 1:
        q = q.view(1, num_kv_heads, group, head_dim)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).reshape(1, -1)
    q = q.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = (x[0].unsqueeze(1).expand(-1, group, -1, -1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    return out.permute(2, 0, 1, 3).reshape(num_tokens, -1)


def _attend_plainly(
    q: torch.Tensor,
    hidden: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    soft_cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`_attend` with a soft cap or sinks, which library calls lack: many one-token rows, or one long row."""
    num_tokens, num_kv_heads, head_dim = len(q), k.shape[1], k.shape[3]
    q = q.view(num_tokens, num_kv_heads, -1, head_dim)
    to_k, to_v = ("tngd,tnsd->tngs", "tngs,tnsd->tngd") if len(k) > 1 else ("tngd,rnsd->tngs", "tngs,rnsd->tngd")
    scores = torch.einsum(to_k, q, k)
    scores = scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap) if soft_cap else scores.mul_(scale)
    scores.masked_fill_(hidden[:, None, None], -math.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        own = sinks.view(num_kv_heads, -1, 1).expand(num_tokens, -1, -1, -1)
        weights = torch.cat((scores, own), -1).softmax(-1)[..., :-1].to(v.dtype)
    return torch.einsum(to_v, weights, v).reshape(num_tokens, -1)


def attention_exact(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: AttentionPlan,
    form: AttentionForm,
    scales: torch.Tensor | None = None,
    *,
    by_head: bool = False,  # a head's bits do not depend on which heads share its keys and values here, either
) -> torch.Tensor:
    """`attention_torch` for `EngineConfig.deterministic`: a token's bits depend only on its own q, k and v.

    Each token attends to chunks of 64 absolute positions with an online softmax (arXiv 1805.02867) in fp32. Products
    have one shape, sums have one length, and chunks are in order. A masked position adds an exact zero, so the result
    depends neither on other rows' lengths nor on the prompt's chunks."""
    head_dim, (scale, window, soft_cap, sinks, whole_images, first_key) = q.shape[-1], form
    pad = (0, -head_dim % _ALIGNED)
    softmax = Softmax(window + first_key > 0, soft_cap, by_head, None if sinks is None else sinks.view(kv.shape[1], -1))
    outs = []
    for span in plan.spans:
        rows = F.pad(q[span.start : span.stop].float() * scale, pad)
        k, v = F.pad(span.view.read(kv, scales).float(), pad).unbind(0)  # copies
        k[..., :first_key, :] = v[..., :first_key, :] = 0
        attend = _exact_decode if len(k) == len(rows) else _exact_prefill
        seen = span.seen(window, whole_images, first_key)
        outs.append(attend(rows, k, v, seen, softmax)[..., :head_dim].flatten(1))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out.to(q.dtype)


class Softmax(NamedTuple):
    """A layer's kind of softmax."""

    bounded: bool  # tokens see no position before some first one
    soft_cap: float
    by_head: bool
    sinks: torch.Tensor | None  # [num_kv_heads, group]; one row for each batch element in `attend_chunks`


def _exact_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, softmax: Softmax
) -> torch.Tensor:
    """One token a row: rows and kv heads are one batch."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, length = k.shape[1:3]
    q = q.reshape(num_rows * num_kv_heads, -1, head_dim)
    k, v = k.reshape(-1, length, head_dim), v.reshape(-1, length, head_dim)
    seen = seen.repeat_interleave(num_kv_heads, 0)
    if softmax.sinks is not None:
        softmax = softmax._replace(sinks=softmax.sinks.repeat(num_rows, 1))
    return attend_chunks(q, k, v, seen, softmax).view(num_rows, num_heads, head_dim)


def _exact_prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, softmax: Softmax
) -> torch.Tensor:
    """One row of many tokens: they share each kv head's keys without a copy."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q, each = q.view(num_tokens, num_kv_heads, -1, head_dim), (num_tokens, -1, -1)
    heads = []
    for h in range(num_kv_heads):
        own = softmax if softmax.sinks is None else softmax._replace(sinks=softmax.sinks[h].expand(num_tokens, -1))
        heads.append(attend_chunks(q[:, h].contiguous(), k[:, h].expand(*each), v[:, h].expand(*each), seen, own))
    return torch.stack(heads, 1).view(num_tokens, num_heads, head_dim)


def attend_chunks(
    q: torch.Tensor,  # [n, group, head_dim], scaled
    k: torch.Tensor,  # [n, chunks * 64, head_dim], perhaps expanded over n
    v: torch.Tensor,  # shaped like k; a value's size may differ
    seen: torch.Tensor,  # [n, 2] the first position, read if bounded, and the one behind the last; at least 1
    softmax: Softmax,
) -> torch.Tensor:
    """[n, group, size of a value]."""
    (n, group, _), (bounded, soft_cap, by_head, sinks) = q.shape, softmax
    if by_head and group > 1:
        heads = []
        for i in range(group):
            own = softmax._replace(sinks=None if sinks is None else sinks[:, i : i + 1])
            heads.append(attend_chunks(q[:, i : i + 1].contiguous(), k, v, seen, own))
        return torch.cat(heads, 1)
    if n == 1:  # a batch with one element may be split over threads in another way
        q, k, v, seen = (x.expand(2, *x.shape[1:]).contiguous() for x in (q, k, v, seen))
        own = softmax if sinks is None else softmax._replace(sinks=sinks.expand(2, -1))
        return attend_chunks(q, k, v, seen, own)[:1]
    best = q.new_full((n, group, 1), _LOWEST)
    total = q.new_zeros((n, group, 1))
    out = q.new_zeros((n, group, v.shape[-1]))
    positions = torch.arange(_CHUNK, dtype=torch.int32, device=q.device)
    for at in range(0, k.shape[1], _CHUNK):
        scores = torch.bmm(q, k[:, at : at + _CHUNK].transpose(1, 2))
        if soft_cap:  # tanh(x) as 1 - 2 / (e**2x + 1): bits of exp depend on no vector width
            scores = (1 - 2 / (scores * (2 / soft_cap)).exp_().add_(1)).mul_(soft_cap)
        hidden = positions + at >= seen[:, 1:]
        if bounded:
            hidden |= positions + at < seen[:, :1]
        scores.masked_fill_(hidden[:, None], -math.inf)
        top = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights = scores.sub_(top).exp_()
        fade = best.sub_(top).exp_()
        total.mul_(fade).add_(weights.sum(-1, keepdim=True))
        out.mul_(fade).add_(torch.bmm(weights, v[:, at : at + _CHUNK]))
        best = top
    if sinks is not None:  # an infinite weight makes the result zero, as it should
        total.add_(sinks[:, :, None].sub(best).exp_())
    return out.div_(total)
