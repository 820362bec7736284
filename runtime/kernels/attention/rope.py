"""Everything between the QKV product and attention: q and k norms, rotary embedding, storing k and v."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from runtime.base.model.decoder_spec import RopeSpec
from runtime.kernels.attention.stored_kv import round_to_integer, scaling, store_kv_torch
from runtime.kernels.magnitudes import larger, largest_magnitude, to_e4m3, within
from runtime.kernels.norm.rms_norm import rms_norm_torch
from runtime.kernels.triton_language import ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl

Heads = Literal["qkv", "qk", "q"]  # a product's: with qk, v is k before its norm; with q, another layer has k and v

_TILE = 2048  # elements per program


class HeadForm(NamedTuple):
    """One layer's heads of q, k and v, and their RMS norms before rotation."""

    heads: Heads = "qkv"
    q_norm: torch.Tensor | None = None  # [head_dim] weight
    k_norm: torch.Tensor | None = None  # [head_dim], with q_norm
    eps: float = 0.0
    v_norm: bool = False  # without a weight; with q_norm on a GPU


PLAIN_HEADS = HeadForm()


def rope_table(rope: RopeSpec, head_dim: int, num_positions: int, dtype: torch.dtype) -> torch.Tensor:
    """[2, num_positions, head_dim]: cos, and sin with its first half negated, so that rotate_half is a plain roll.

    Dimension i is rotated with dimension i + head_dim / 2. If only a share of the head is rotated, its dimensions come
    first in either half, and the others have cos 1 and sin 0. The decoder orders the weights accordingly. The type
    proportional has them there already, with the frequencies of a whole head."""
    rotary_dim = int(head_dim * rope.partial)
    positions = torch.arange(num_positions)
    if rope.type == "proportional":
        rotary_dim = rotary_dim // 2 * 2
        frequencies = _frequencies(replace(rope, type="linear"), head_dim, positions)[: rotary_dim // 2]
    else:
        frequencies = _frequencies(rope, rotary_dim, positions)
    angles = positions.float()[:, None] * frequencies
    pad = (0, (head_dim - rotary_dim) // 2)
    cos = F.pad(angles.cos() * rope.attention_factor, pad, value=1.0)
    sin = F.pad(angles.sin() * rope.attention_factor, pad)
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).to(dtype)


def rope_axes(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """[head_dim] the position that turns each column of a table: 0 by frame, 1 by row, 2 by column (M-RoPE, arXiv
    2409.12191)."""
    axes = torch.zeros(head_dim // 2, dtype=torch.int64)
    if rope.mixed_sections:
        for axis in (1, 2):
            axes[axis : 3 * rope.sections[axis] : 3] = axis
    elif rope.sections:
        stated = torch.repeat_interleave(torch.arange(3), torch.tensor(rope.sections))
        axes[: len(stated)] = stated[: len(axes)]
    return axes.repeat(2)


def rope_table_of_step(table: torch.Tensor, axes: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[2, num_tokens, head_dim]: a table's row for each token, with each column from the row of its axis.

    `axes` come from `rope_axes`; `positions` are [3, num_tokens]. Equal positions give the table's own rows."""
    rows = positions[axes].T.long()
    return table.gather(1, rows.expand(2, -1, -1))


def query_scale_table(rope: RopeSpec, num_positions: int) -> torch.Tensor | None:
    """[num_positions, 1, 1] float32: a factor of q by position (arXiv 2501.19399); None if all are 1."""
    if not rope.query_beta or num_positions <= rope.original_positions:
        return None
    periods = torch.arange(num_positions) // rope.original_positions
    return (1 + rope.query_beta * (1 + periods).log())[:, None, None]


def _frequencies(rope: RopeSpec, dim: int, positions: torch.Tensor) -> torch.Tensor:
    """[dim / 2], or [num_positions, dim / 2]: as in transformers' modeling_rope_utils.

    - linear: all frequencies divided by the factor.
    - dynamic: a larger theta beyond the original context (NTK). transformers derives theta from the sequence length at
      each step, which a shared cache cannot do. Here, a position has the theta of the sequence that it ends. That
      equals transformers if it decodes from a prompt within the context.
    - llama3: short wavelengths stay, long ones are stretched, with a smooth band between (Llama 3.1's code).
    - yarn: the same between two numbers of turns in the original context, linear in the dimension (2309.00071).
    - longrope: divisors by dimension (2402.13753), with another set beyond the original context. transformers changes
      the set when a sequence becomes longer, and computes all keys again. Here, the server's context length selects the
      set: short up to the original context, else long."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    freqs = 1.0 / rope.theta**exponents
    original = rope.original_positions
    match rope.type:
        case "linear":
            return freqs / rope.factor
        case "dynamic":
            lengths = (positions + 1).clamp(min=original)
            # Uses float64, since the last bit of torch's float32 powers depends on an element's place in the tensor.
            grown = (rope.factor * lengths.double() / original) - (rope.factor - 1)
            thetas = rope.theta * grown ** (dim / (dim - 2))
            return (1.0 / thetas[:, None] ** exponents.double()).float()
        case "llama3":
            wavelengths = 2 * math.pi / freqs
            low, high = rope.low_freq_factor, rope.high_freq_factor
            smooth = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
            return (1 - smooth) * freqs / rope.factor + smooth * freqs
        case "yarn":
            turns = (rope.beta_fast, rope.beta_slow)
            low, high = (dim * math.log(original / (n * 2 * math.pi)) / (2 * math.log(rope.theta)) for n in turns)
            if rope.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            ramp = ((torch.arange(dim // 2).float() - low) / (high - low or 0.001)).clamp(0.0, 1.0)
            return freqs / rope.factor * ramp + freqs * (1 - ramp)
        case "longrope":
            factors = rope.long_factor if len(positions) > original else rope.short_factor
            return 1.0 / (torch.tensor(factors) * rope.theta**exponents)
    return freqs


def rope_rows_torch(table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The `rope` argument for `rope_store_kv_torch`: cos and sin for a step's tokens, gathered once for all layers."""
    cos, sin = table.index_select(1, positions).unsqueeze(2).unbind(0)
    return cos, sin


def rope_rows_triton(table: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The `rope` argument for `rope_store_kv_triton`; the kernel itself reads its table rows."""
    return table, positions


def rope_store_kv_torch(
    qkv: torch.Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; may be overwritten
    rope: tuple[torch.Tensor, torch.Tensor],  # cos and sin, each [num_tokens, 1, head_dim], sin's first half negated
    kv: torch.Tensor,  # [2, num_kv_heads, num_blocks, block_size, head_dim], one layer's cache
    kv_index: torch.Tensor,  # [num_tokens] block * block_size + offset; int64 is fastest here
    form: HeadForm = PLAIN_HEADS,
    scales: torch.Tensor | None = None,  # a quantized cache's scales (stored_kv.py)
) -> torch.Tensor:
    """q, normed and rotated: [num_tokens, num_heads, head_dim], here a view of qkv; k, the same, and v go into the
    cache."""
    num_kv_heads, head_dim, (heads, q_norm, k_norm, eps, v_norm) = kv.shape[1], kv.shape[4], form
    num_heads = qkv.shape[1] - (len(heads) - 1) * num_kv_heads
    qk = qkv[:, : num_heads + num_kv_heads]
    values = qk[:, num_heads:].clone() if heads == "qk" else qkv[:, num_heads + num_kv_heads :]
    if q_norm is not None and k_norm is not None:
        for part, weight in ((qk[:, :num_heads], q_norm), (qk[:, num_heads:], k_norm)):
            part.copy_(rms_norm_torch(part, weight, eps))
    if v_norm:
        values.copy_(F.rms_norm(values, (head_dim,), None, eps))
    # Products and sum are separate operations, so that each is rounded exactly whatever the vector width or threads.
    cos, sin = rope
    rotated = qk.roll(head_dim // 2, -1).mul_(sin)
    qk.mul_(cos).add_(rotated)
    if heads != "q":
        keys_and_values = torch.cat((qk[:, num_heads:], values), 1) if heads == "qk" else qkv[:, num_heads:]
        store_kv_torch(keys_and_values, kv, scales, kv_index.long())
    return qkv[:, :num_heads]


class RopeForm(NamedTuple):
    """Constants of `_rope_store_kv_kernel`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool
    v_norm: bool
    heads: str  # qkv | qk | q
    scales: str  # none | head | token
    block_heads: int  # heads per program
    block_half: int  # power of two, at least HEAD_DIM / 2
    pdl: bool


@jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def _rope_store_kv_kernel(
    qkv_ptr,  # [num_tokens, all heads of HEADS, HEAD_DIM], tokens qkv_stride apart
    table_ptr,  # [2, num_positions, HEAD_DIM], rows contiguous, cos and sin sin_offset apart
    positions_ptr,  # [num_tokens] int32 or int64
    kv_ptr,  # [2 * NUM_KV_HEADS, positions, HEAD_DIM], heads cache_positions apart
    kv_index_ptr,  # [num_tokens] int32 or int64
    q_norm_ptr,  # [HEAD_DIM]; not read without QK_NORM
    k_norm_ptr,  # [HEAD_DIM]
    q_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM] contiguous
    scales_ptr,  # a quantized cache's scales (stored_kv.py), contiguous; not used without SCALES
    qkv_stride,
    sin_offset,
    cache_positions,  # distance from one head's cache to the next
    eps,
    FORM: tl.constexpr,  # `RopeForm`
):
    HALF: tl.constexpr = FORM.head_dim // 2
    TOTAL: tl.constexpr = FORM.num_heads if FORM.heads == "q" else FORM.num_heads + 2 * FORM.num_kv_heads
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * FORM.block_heads + tl.arange(0, FORM.block_heads)[:, None]
    dims = tl.arange(0, FORM.block_half)[None, :]
    is_q, is_v = heads < FORM.num_heads, heads >= FORM.num_heads + FORM.num_kv_heads
    inside = (heads < TOTAL) & (dims < HALF)
    # Before the wait: qkv comes from the kernel before this one, positions and kv_index from earlier ones.
    row = (
        table_ptr + tl.load(positions_ptr + token).to(tl.int64) * FORM.head_dim + HALF + dims
    )  # here sin is not negated
    cos = tl.load(row, mask=dims < HALF, other=0.0).to(tl.float32)
    sin = tl.load(row + sin_offset, mask=dims < HALF, other=0.0).to(tl.float32)
    place = (heads - FORM.num_heads).to(tl.int64) * cache_positions + tl.load(kv_index_ptr + token)
    if FORM.qk_norm:
        q_norm_low = tl.load(q_norm_ptr + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        q_norm_high = tl.load(q_norm_ptr + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        k_norm_low = tl.load(k_norm_ptr + dims, mask=dims < HALF, other=0.0).to(tl.float32)
        k_norm_high = tl.load(k_norm_ptr + HALF + dims, mask=dims < HALF, other=0.0).to(tl.float32)
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sources = tl.where(is_v, heads - FORM.num_kv_heads, heads) if FORM.heads == "qk" else heads
    at = qkv_ptr + token * qkv_stride + sources * FORM.head_dim + dims
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if FORM.qk_norm:
        squares = tl.sum(low * low + high * high, axis=1)
        scale = (1.0 / tl.sqrt(squares / FORM.head_dim + eps))[:, None]
        v_low, v_high = (low * scale, high * scale) if FORM.v_norm else (low, high)
        low = tl.where(is_v, v_low, low * scale * tl.where(is_q, q_norm_low, k_norm_low))
        high = tl.where(is_v, v_high, high * scale * tl.where(is_q, q_norm_high, k_norm_high))
    turned_low = tl.where(is_v, low, low * cos - high * sin)
    turned_high = tl.where(is_v, high, high * cos + low * sin)
    at_q = q_ptr + (token * FORM.num_heads + heads) * FORM.head_dim + dims
    at_kv = kv_ptr + place * FORM.head_dim + dims
    tl.store(at_q, turned_low.to(q_ptr.dtype.element_ty), mask=inside & is_q)
    tl.store(at_q + HALF, turned_high.to(q_ptr.dtype.element_ty), mask=inside & is_q)
    if FORM.scales == "head":
        inverse = tl.div_rn(1.0, tl.load(scales_ptr + heads - FORM.num_heads, mask=(heads < TOTAL) & ~is_q, other=1.0))
        turned_low = to_e4m3(within(turned_low * inverse, 448.0))
        turned_high = to_e4m3(within(turned_high * inverse, 448.0))
    if FORM.scales == "token":
        largest = largest_magnitude(larger(tl.abs(turned_low), tl.abs(turned_high)), 1)
        scale = (largest / 127.0).to(scales_ptr.dtype.element_ty)[:, None]
        key_place = place - tl.where(is_v, FORM.num_kv_heads * cache_positions, 0)
        tl.store(scales_ptr + key_place * 2 + is_v, scale, mask=(heads < TOTAL) & ~is_q)
        scale = scale.to(tl.float32)
        inverse = tl.where(scale > 0.0, tl.div_rn(1.0, scale), 0.0)  # a zero head has scale 0
        turned_low = round_to_integer(within(turned_low * inverse, 127.0))
        turned_high = round_to_integer(within(turned_high * inverse, 127.0))
    tl.store(at_kv, turned_low.to(kv_ptr.dtype.element_ty), mask=inside & (heads >= FORM.num_heads))
    tl.store(at_kv + HALF, turned_high.to(kv_ptr.dtype.element_ty), mask=inside & (heads >= FORM.num_heads))


def rope_store_kv_triton(
    qkv: torch.Tensor,  # any stride between tokens
    rope: tuple[torch.Tensor, torch.Tensor],  # `rope_rows_triton`'s result
    kv: torch.Tensor,
    kv_index: torch.Tensor,  # int32; like the positions, not written by the kernel right before this one
    form: HeadForm = PLAIN_HEADS,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rope_store_kv_torch` as one kernel; q is a tensor of its own. Tiles have one shape whatever the number of
    tokens, so that a token's bits do not depend on it."""
    (table, positions), (heads, q_norm, k_norm, eps, v_norm) = rope, form
    num_tokens, num_own, head_dim = qkv.shape
    num_kv_heads = kv.shape[1]
    num_heads = num_own - (len(heads) - 1) * num_kv_heads
    num_all = num_own + num_kv_heads if heads == "qk" else num_own
    q = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    if num_tokens:
        block_half, pdl = next_power_of_2(head_dim // 2), use_pdl(qkv)
        block_heads = min(next_power_of_2(num_all), max(_TILE // (2 * block_half), 1))
        _rope_store_kv_kernel[(num_tokens, -(-num_all // block_heads))](
            qkv, table, positions, kv, kv_index, *((qkv, qkv) if q_norm is None else (q_norm, k_norm)), q,
            kv if scales is None else scales, qkv.stride(0), table.stride(0), kv.stride(1) // head_dim, eps,
            FORM=RopeForm(
                num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, qk_norm=q_norm is not None,
                v_norm=v_norm, heads=heads, scales=scaling(scales), block_heads=block_heads, block_half=block_half,
                pdl=pdl,
            ),
            num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return q
