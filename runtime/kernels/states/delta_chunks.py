"""The gated delta rule in chunks of CHUNK tokens, on a GPU: for prompts (arXiv 2412.06464, 2406.06484).

delta_rule_torch.py has the equations. With S as the state before a chunk, its updates are U = V' - W S, where

    T = (1 + A)^-1,  A_ij = b_i exp(g_i - g_j) (k_i . k_j) for j < i,  V' = T diag(b) V,  W = T diag(b exp(g)) K

and g are the sums of log decays. One kernel computes V', W and all chunks' scores in parallel. A second one
carries S through a row's chunks, for a head and a block of its value dimensions. A third one applies the gated
norm.

Each chunk is computed in the same tiles, and its missing tokens are zeros. So a token's bits depend neither on how its
prompt was cut nor on other rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from runtime.base.kv_cache_spec import CHUNK
from runtime.kernels.attention.paged_attention import find_row, rows_searched
from runtime.kernels.attention.segments import num_sms
from runtime.kernels.states.delta_rule_torch import NORM_EPS
from runtime.kernels.states.delta_steps import gated_norm, log_decay, stride_unit
from runtime.kernels.step.state_rows import DeltaForm, DeltaState, StateRows
from runtime.kernels.triton_language import ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl

_SCALARS = 3  # numbers per token and head: q's factor, k's factor, and the chunk's decay
_NORM_TOKENS = 32  # tokens per gated-norm program
_VALUES = 32  # value dimensions of a head that a program carries the state for; or twice as many


@jit
def _inverse(a, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + a)^-1 for a strictly lower triangular matrix [CHUNK, CHUNK], float32.

    Diagonal 16-blocks by forward substitution, all at once. Then blocks twice the size: with both
    diagonal blocks inverted as T, and L below them, the inverse is T - T L T."""
    BLOCKS: tl.constexpr = CHUNK // 16
    block_ids = tl.arange(0, BLOCKS)
    same_block = block_ids[:, None, None, None] == block_ids[None, None, :, None]
    within = tl.arange(0, 16)
    inverse = -tl.sum(tl.where(same_block, tl.reshape(a, (BLOCKS, 16, BLOCKS, 16)), 0.0), axis=2)
    for i in range(2, 16):  # rows 0 and 1 are done
        is_row = (within == i)[None, :, None]
        row = tl.sum(tl.where(is_row, inverse, 0.0), axis=1)
        row += tl.sum(row[:, :, None] * inverse, axis=1)
        inverse = tl.where(is_row, row[:, None, :], inverse)
    inverse += tl.where(within[:, None] == within[None, :], 1.0, 0.0)[None, :, :]
    inverse = tl.where(same_block, tl.broadcast_to(inverse[:, :, None, :], (BLOCKS, 16, BLOCKS, 16)), 0.0)
    inverse = tl.reshape(inverse, (CHUNK, CHUNK))
    index = tl.arange(0, CHUNK)
    size = 16
    for _ in tl.static_range(2 if CHUNK == 64 else 0):
        rows, columns = (index // size)[:, None], (index // size)[None, :]
        below = tl.where((rows == columns + 1) & (rows % 2 == 1), a, 0.0)
        below = tl.dot(inverse, below, input_precision=PRECISION)
        inverse -= tl.dot(below, inverse, input_precision=PRECISION)
        size *= 2
    return inverse


@jit
def _chunk_of_place(
    slots_ptr, starts_ptr, q_starts_ptr, places_ptr, places_stride, num_rows, place, TILE: tl.constexpr,
    NUM_ROWS: tl.constexpr,
):  # fmt: skip
    """(first token, number of tokens) for a tile of TILE tokens in a row's prompt; the number may be below 1."""
    row, tile = find_row(q_starts_ptr, place, num_rows, TILE, NUM_ROWS)
    begin = tl.load(q_starts_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    prompt_end = tl.load(places_ptr + slot * places_stride + 1)
    count = tl.minimum(prompt_end - tl.load(starts_ptr + row), tl.load(q_starts_ptr + row + 1) - begin)
    return begin + tile * TILE, tl.minimum(count - tile * TILE, TILE)


class ChunksForm(NamedTuple):
    """Constants of the three kernels."""

    key_heads: int
    group: int  # neighbours among the value heads with the same key head
    value_heads: int
    key_dim: int
    value_dim: int
    num_rows: int  # power of two, at least the number of rows
    block_k: int  # power of two, at least key_dim
    block_v: int  # value dimensions per program
    precision: str  # precision of products in qkv's dtype
    solve_precision: str
    stride_unit: int  # states lie a multiple of it apart
    row_bytes: int  # w and q rows begin at its multiples
    pdl: bool
    chunk: int = CHUNK
    norm_eps: float = NORM_EPS  # q's and k's
    tile: int = _NORM_TOKENS  # tokens per program of the norm


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _prepare_chunks_kernel(
    qkv_ptr,  # see `_delta_steps_kernel`
    gates_ptr,
    decay_log_ptr,
    decay_bias_ptr,
    out_ptr,  # [num_tokens, VALUE_HEADS, VALUE_DIM] V'
    w_ptr,  # [num_tokens, VALUE_HEADS, KEY_DIM]
    scores_ptr,  # [num_tokens, VALUE_HEADS, CHUNK] q k^T with decays
    scalars_ptr,  # [num_tokens, VALUE_HEADS, 3] float32
    slots_ptr,
    starts_ptr,
    q_starts_ptr,
    places_ptr,
    qkv_stride,
    gates_stride,
    places_stride,
    num_rows,
    scale,
    FORM: tl.constexpr,  # `ChunksForm`
):
    head, place = tl.program_id(0) % FORM.value_heads, tl.program_id(0) // FORM.value_heads
    first, count = _chunk_of_place(
        slots_ptr, starts_ptr, q_starts_ptr, places_ptr, places_stride, num_rows, place, FORM.chunk, FORM.num_rows
    )
    decay_rate, decay_bias = tl.load(decay_log_ptr + head), tl.load(decay_bias_ptr + head)
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count <= 0:
        return
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    index, keys, values = tl.arange(0, FORM.chunk), tl.arange(0, FORM.block_k), tl.arange(0, FORM.block_v)
    used = index < count
    tokens = (first + index).to(tl.int64)
    is_key = used[:, None] & (keys < FORM.key_dim)[None, :]
    is_value = used[:, None] & (values < FORM.value_dim)[None, :]
    key_head = head // FORM.group % FORM.key_heads
    at_q = qkv_ptr + tokens[:, None] * qkv_stride + key_head * FORM.key_dim + keys[None, :]
    at_v = (
        qkv_ptr
        + tokens[:, None] * qkv_stride
        + (2 * FORM.key_heads * FORM.key_dim + head * FORM.value_dim)
        + values[None, :]
    )
    k = tl.load(at_q + FORM.key_heads * FORM.key_dim, mask=is_key, other=0.0)
    q = tl.load(at_q, mask=is_key, other=0.0)
    at_gates = gates_ptr + tokens * gates_stride + head
    b = tl.load(at_gates, mask=used, other=0.0).to(tl.float32)
    a = tl.load(at_gates + FORM.value_heads, mask=used, other=0.0).to(tl.float32)
    rates = tl.where(used, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    sums = tl.cumsum(tl.where(used, log_decay(a, decay_rate, decay_bias), 0.0), axis=0)
    last = tl.sum(tl.where(index == FORM.chunk - 1, sums, 0.0), axis=0)
    wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
    q_scale = scale / tl.sqrt(tl.sum(wide_q * wide_q, axis=1) + FORM.norm_eps)
    k_scale = 1.0 / tl.sqrt(tl.sum(wide_k * wide_k, axis=1) + FORM.norm_eps)

    lower = index[:, None] >= index[None, :]
    ratios = tl.exp(tl.where(lower, sums[:, None] - sums[None, :], float("-inf"))) * k_scale[None, :]
    scores = tl.dot(q, tl.trans(k), input_precision=FORM.precision) * ratios * q_scale[:, None]
    at_scores = scores_ptr + (tokens * FORM.value_heads + head)[:, None] * FORM.chunk + index[None, :]
    tl.store(at_scores, scores.to(DTYPE), mask=used[:, None])
    system = tl.dot(k, tl.trans(k), input_precision=FORM.precision) * ratios * (rates * k_scale)[:, None]
    system = tl.where(index[:, None] > index[None, :], system, 0.0)
    inverse = _inverse(system, FORM.chunk, tl.constexpr(FORM.solve_precision))
    v = tl.load(at_v, mask=is_value, other=0.0)  # not before: it would hold shared memory
    v_updates = tl.dot((inverse * rates[None, :]).to(DTYPE), v, input_precision=FORM.precision)
    at_out = out_ptr + (tokens * FORM.value_heads + head)[:, None] * FORM.value_dim + values[None, :]
    tl.store(at_out, v_updates.to(DTYPE), mask=is_value)
    w = tl.dot((inverse * (rates * tl.exp(sums) * k_scale)[None, :]).to(DTYPE), k, input_precision=FORM.precision)
    at_w = w_ptr + (tokens * FORM.value_heads + head)[:, None] * FORM.key_dim + keys[None, :]
    tl.store(at_w, w.to(DTYPE), mask=is_key)
    at_scalars = scalars_ptr + (tokens * FORM.value_heads + head) * 3
    tl.store(at_scalars, q_scale * tl.exp(sums), mask=used)
    tl.store(at_scalars + 1, k_scale * tl.exp(last - sums), mask=used)
    tl.store(at_scalars + 2, tl.exp(last + tl.zeros_like(sums)), mask=used)


@jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def _carry_state_kernel(
    qkv_ptr,
    out_ptr,  # V', then the output
    w_ptr,
    scores_ptr,
    scalars_ptr,
    state_ptr,  # see `_delta_steps_kernel`
    covered_ptr,
    slots_ptr,
    starts_ptr,
    q_starts_ptr,
    places_ptr,
    qkv_stride,
    state_stride,
    covered_stride,
    places_stride,
    FORM: tl.constexpr,  # `ChunksForm`
):
    BLOCKS: tl.constexpr = (FORM.value_dim + FORM.block_v - 1) // FORM.block_v
    block, head = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS % FORM.value_heads
    row = tl.program_id(0) // (BLOCKS * FORM.value_heads)
    first = tl.load(q_starts_ptr + row)
    start = tl.load(starts_ptr + row)
    place_ptr = places_ptr + tl.load(slots_ptr + row).to(tl.int64) * places_stride
    own, prompt_end = tl.load(place_ptr).to(tl.int64), tl.load(place_ptr + 1)
    snapshot_end, snapshot = tl.load(place_ptr + 2), tl.load(place_ptr + 3).to(tl.int64)
    count = tl.minimum(prompt_end - start, tl.load(q_starts_ptr + row + 1) - first)
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count <= 0:
        return
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    index, keys = tl.arange(0, FORM.chunk), tl.arange(0, FORM.block_k)
    values = block * FORM.block_v + tl.arange(0, FORM.block_v)
    is_key, is_value = keys < FORM.key_dim, values < FORM.value_dim
    whole = is_key[:, None] & is_value[None, :]
    state_ptr += head * (FORM.key_dim * FORM.value_dim) + keys[:, None] * FORM.value_dim + values[None, :]
    covered_ptr += head
    known = (keys < tl.where(start == 0, 0, FORM.key_dim))[:, None] & is_value[None, :]
    matrix = tl.load(state_ptr + own * state_stride * FORM.stride_unit, mask=known, other=0.0)
    has_snapshot = (start < snapshot_end) & (snapshot_end <= start + count)
    # w rows, then q rows: one product with the state makes both.
    both = tl.arange(0, 2 * FORM.chunk)
    is_w, both_index = both < FORM.chunk, both % FORM.chunk
    qkv_ptr += first.to(tl.int64) * qkv_stride + head // FORM.group % FORM.key_heads * FORM.key_dim
    head_offset = first.to(tl.int64) * FORM.value_heads + head
    w_ptr += head_offset * FORM.key_dim
    out_ptr += head_offset * FORM.value_dim
    scores_ptr += head_offset * FORM.chunk
    scalars_ptr += head_offset * 3
    at_scalars = index * (FORM.value_heads * 3)
    q_scale = tl.load(scalars_ptr + at_scalars, mask=index < count, other=0.0)
    k_scale = tl.load(scalars_ptr + at_scalars + 1, mask=index < count, other=0.0)
    decay = tl.load(scalars_ptr + 2)
    begin = 0
    for part in range(1 + has_snapshot.to(tl.int32)):  # what follows the snapshot is the last part
        is_last = part == has_snapshot.to(tl.int32)
        stop = tl.where(is_last, count, snapshot_end - start)
        for at in range(begin, stop, FORM.chunk):
            used = index < count - at
            whole_out = used[:, None] & is_value[None, :]
            at_w = tl.where(
                is_w, w_ptr + both_index * (FORM.value_heads * FORM.key_dim), qkv_ptr + both_index * qkv_stride
            )
            at_w = tl.multiple_of(at_w, tl.constexpr(FORM.row_bytes))[:, None] + keys[None, :]
            at_k = qkv_ptr + FORM.key_heads * FORM.key_dim + index[:, None] * qkv_stride + keys[None, :]
            at_out = out_ptr + index[:, None] * (FORM.value_heads * FORM.value_dim) + values[None, :]
            at_scores = scores_ptr + index[:, None] * (FORM.value_heads * FORM.chunk) + index[None, :]
            w = tl.load(at_w, mask=(both_index < count - at)[:, None] & is_key[None, :], other=0.0)
            k = tl.load(at_k, mask=used[:, None] & is_key[None, :], other=0.0)
            updates = tl.load(at_out, mask=whole_out, other=0.0)
            scores = tl.load(at_scores, mask=used[:, None], other=0.0)
            scalars_ptr += FORM.chunk * FORM.value_heads * 3
            is_next = index < count - at - FORM.chunk
            next_q_scale = tl.load(scalars_ptr + at_scalars, mask=is_next, other=0.0)
            next_k_scale = tl.load(scalars_ptr + at_scalars + 1, mask=is_next, other=0.0)
            next_decay = tl.load(scalars_ptr + 2, mask=at + FORM.chunk < count, other=0.0)
            products = tl.dot(w, matrix.to(DTYPE), input_precision=FORM.precision)
            products = tl.permute(tl.reshape(products, (2, FORM.chunk, FORM.block_v)), (1, 2, 0))
            w_product, q_product = tl.split(products)
            updates = updates.to(tl.float32) - w_product
            scaled = (updates * k_scale[:, None]).to(DTYPE)
            matrix = tl.dot(tl.trans(k), scaled, matrix * decay, input_precision=FORM.precision)
            out = tl.dot(scores, updates.to(DTYPE), q_product * q_scale[:, None], input_precision=FORM.precision)
            tl.store(at_out, out.to(DTYPE), mask=whole_out)
            w_ptr += FORM.chunk * FORM.value_heads * FORM.key_dim
            qkv_ptr += FORM.chunk * qkv_stride
            out_ptr += FORM.chunk * FORM.value_heads * FORM.value_dim
            scores_ptr += FORM.chunk * FORM.value_heads * FORM.chunk
            q_scale, k_scale, decay = next_q_scale, next_k_scale, next_decay
        target = tl.where(is_last, own, snapshot)
        tl.store(state_ptr + target * state_stride * FORM.stride_unit, matrix, mask=whole)
        if block == 0:
            tl.store(covered_ptr + target * covered_stride, start + stop)
        begin = stop


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=ROW_ARRAYS)
def _norm_chunks_kernel(
    out_ptr,  # [num_tokens, VALUE_HEADS, VALUE_DIM] the output, then its norm
    z_ptr,
    norm_ptr,
    slots_ptr,
    starts_ptr,
    q_starts_ptr,
    places_ptr,
    z_stride,
    places_stride,
    num_rows,
    eps,
    FORM: tl.constexpr,  # `ChunksForm`
):
    """The gated norm for prompt tokens."""
    head, place = tl.program_id(0) % FORM.value_heads, tl.program_id(0) // FORM.value_heads
    first, count = _chunk_of_place(
        slots_ptr, starts_ptr, q_starts_ptr, places_ptr, places_stride, num_rows, place, FORM.tile, FORM.num_rows
    )
    values = tl.arange(0, FORM.block_v)
    weight = tl.load(norm_ptr + values, mask=values < FORM.value_dim, other=0.0)
    if FORM.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count <= 0:
        return
    tokens = (first + tl.arange(0, FORM.tile)).to(tl.int64)
    whole = (tl.arange(0, FORM.tile) < count)[:, None] & (values < FORM.value_dim)[None, :]
    at_out = out_ptr + (tokens * FORM.value_heads + head)[:, None] * FORM.value_dim + values[None, :]
    out = tl.load(at_out, mask=whole, other=0.0)
    z = tl.load(z_ptr + tokens[:, None] * z_stride + head * FORM.value_dim + values[None, :], mask=whole, other=0.0)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    wide = out.to(tl.float32)
    squares = tl.sum(wide * wide, axis=1)[:, None]
    tl.store(at_out, gated_norm(out, squares, z, weight[None, :], eps, FORM.value_dim, DTYPE).to(DTYPE), mask=whole)


def launch_chunks(
    qkv: torch.Tensor,
    z: torch.Tensor,
    gates: torch.Tensor,
    form: DeltaForm,
    rows: StateRows,
    state: DeltaState,
    out: torch.Tensor,  # [num_tokens, value_heads * value_dim] contiguous; prompt tokens' rows are written
) -> None:
    """The prompt tokens in `delta_rule_torch`."""
    (_, value_heads, key_dim, value_dim), (decay_log, decay_bias, norm_weight, eps, tiled) = state.state.shape, form
    key_heads = (qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    group = 1 if tiled else value_heads // key_heads
    w = torch.empty((len(qkv), value_heads, key_dim), dtype=qkv.dtype, device=qkv.device)
    scores = torch.empty((len(qkv), value_heads, CHUNK), dtype=qkv.dtype, device=qkv.device)
    scalars = torch.empty((len(qkv), value_heads, _SCALARS), dtype=torch.float32, device=qkv.device)
    # No matrix instruction multiplies float32; three tf32 products lose two of its 24 bits. With 16 bits, T is
    # rounded to fewer than tf32 has.
    precision, solve = ("tf32x3", "tf32x3") if qkv.dtype == torch.float32 else ("ieee", "tf32")
    unit, pdl, num_rows = stride_unit(state), use_pdl(qkv), rows_searched(rows.num_rows)
    block_k, block_v = (max(16, next_power_of_2(dim)) for dim in (key_dim, value_dim))
    # Triton 3.6 miscompiles loops around wgmma in some forms: this one with 16-wide heads, without pipelining, or with
    # rows that are not aligned to 16 bytes. It does so for others (flash-linear-attention, pull request 988). Two warps
    # use older instructions. 128-wide heads with the stages below were checked on an H200.
    row_bytes = _row_bytes(qkv, key_dim)
    num_warps = 4 if key_dim == value_dim == 128 and row_bytes == 16 else 2
    value_block, carry_warps, stages = min(block_v, _VALUES), num_warps, 2 if qkv.dtype == torch.float32 else 3
    long_rows = max(rows.num_tokens // max(rows.max_count, 1), 1)  # about; other rows' programs end at once
    if num_warps == 4 and stages == 3 and long_rows * value_heads * (value_dim // _VALUES) > num_sms(qkv.device):
        value_block, carry_warps = 2 * _VALUES, 8  # an SM holds one program, so half as many take fewer waves
    arrays = rows.slots, rows.starts, rows.q_starts, rows.places
    sizes = key_heads, group, value_heads, key_dim, value_dim
    constants = ChunksForm(*sizes, num_rows, block_k, block_v, precision, solve, unit, row_bytes, pdl)
    _prepare_chunks_kernel[((rows.num_tokens // CHUNK + rows.num_rows) * value_heads,)](
        qkv, gates, decay_log, decay_bias, out, w, scores, scalars, *arrays,
        qkv.stride(0), gates.stride(0), rows.places.stride(0), rows.num_rows, key_dim**-0.5,
        constants, num_warps=num_warps, maxnreg=168 if num_warps == 4 else 255, launch_pdl=pdl,
    )  # fmt: skip
    _carry_state_kernel[(rows.num_rows * value_heads * -(-value_dim // value_block),)](
        qkv, out, w, scores, scalars, state.state, state.positions, *arrays,
        qkv.stride(0), state.state.stride(0) // unit, state.positions.stride(0), rows.places.stride(0),
        constants._replace(block_v=value_block), num_warps=carry_warps, num_stages=stages, launch_pdl=pdl,
    )  # fmt: skip
    places = rows.num_tokens // _NORM_TOKENS + rows.num_rows
    _norm_chunks_kernel[(places * value_heads,)](
        out, z, norm_weight, *arrays, z.stride(0), rows.places.stride(0), rows.num_rows, eps,
        constants, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def _row_bytes(qkv: torch.Tensor, key_dim: int) -> int:
    """A power of two, 16 at most, that divides each q head's address."""
    size = qkv.element_size()
    return math.gcd(16, qkv.data_ptr(), qkv.stride(0) * size, key_dim * size)
