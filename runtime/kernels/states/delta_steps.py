"""The gated delta rule token after token, on a GPU: for decoded and draft tokens.

One program computes a value head of a row and holds its state in registers. First it applies updates from the ring,
which the stored state lacks. It stores the state after the last update that later rows cannot reject. No other program
reads or writes the head's memory.

The programs of a decode step do that before they wait for the kernel before them. Only this kernel writes this memory,
in earlier steps. Each step contains kernels that wait before others may start, so earlier steps are complete.
"""

from __future__ import annotations

import torch

from runtime.base.kv_cache_spec import RING
from runtime.kernels.states.delta_rule_torch import NORM_EPS
from runtime.kernels.step.state_rows import LAG, MOST_PENDING, DeltaForm, DeltaState, StateRows
from runtime.kernels.triton_language import ROW_ARRAYS, jit, next_power_of_2, tl, use_pdl


@jit
def log_decay(a, decay_log, decay_bias):
    """The log of the decay, below zero, from its logits in float32."""
    x = a + decay_bias
    softplus = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    return -tl.exp(decay_log) * softplus


@jit
def gated_norm(out, squares, z, weight, eps, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """norm(out) * weight * silu(z), in float32; out and z have DTYPE, and squares is out's square sum.

    It rounds where the torch twin does."""
    out = out.to(tl.float32) / tl.sqrt(squares / SIZE + eps)
    scaled = out.to(DTYPE).to(tl.float32) * weight.to(tl.float32)
    if weight.dtype == DTYPE:
        scaled = scaled.to(DTYPE).to(tl.float32)
    z = z.to(tl.float32)
    return scaled * (z / (1.0 + tl.exp(-z)))


@jit
def _load_pending(keys_ptr, values_ptr, decays_ptr, position, keys, values, KEY_DIM: tl.constexpr,
                  VALUE_DIM: tl.constexpr, RING: tl.constexpr):  # fmt: skip
    """(key, update, decay) of a position, from the ring."""
    place = position & (RING - 1)
    key = tl.load(keys_ptr + place * KEY_DIM + keys, mask=keys < KEY_DIM, other=0.0)
    update = tl.load(values_ptr + place * VALUE_DIM + values, mask=values < VALUE_DIM, other=0.0)
    return key, update, tl.load(decays_ptr + place)


@jit
def _updated(matrix, key, update):
    """matrix + outer(key, update) with one rounding, also where the compiler would choose another."""
    key, update = tl.broadcast_to(key[:, None], matrix.shape), tl.broadcast_to(update[None, :], matrix.shape)
    return tl.fma(key, update, matrix)


@jit
def _load_token(qkv_ptr, gates_ptr, z_ptr, token, head, keys, values, qkv_stride, gates_stride, z_stride,
                KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr,
                VALUE_DIM: tl.constexpr):  # fmt: skip
    """A token's (q, k, v, logits for rate and decay, z)."""
    token = token.to(tl.int64)
    qkv_ptr += token * qkv_stride
    at_q = qkv_ptr + head // GROUP % KEY_HEADS * KEY_DIM + keys
    at_v = qkv_ptr + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values
    q = tl.load(at_q, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
    k = tl.load(at_q + KEY_HEADS * KEY_DIM, mask=keys < KEY_DIM, other=0.0).to(tl.float32)
    v = tl.load(at_v, mask=values < VALUE_DIM, other=0.0).to(tl.float32)
    at_gates = gates_ptr + token * gates_stride + head
    b, a = tl.load(at_gates).to(tl.float32), tl.load(at_gates + VALUE_HEADS).to(tl.float32)
    z = tl.load(z_ptr + token * z_stride + head * VALUE_DIM + values, mask=values < VALUE_DIM, other=0.0)
    return q, k, v, b, a, z


@jit(do_not_specialize_on_alignment=ROW_ARRAYS)
def _delta_steps_kernel(
    qkv_ptr,  # [num_tokens, 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM]
    z_ptr,  # [num_tokens, VALUE_HEADS * VALUE_DIM]
    gates_ptr,  # [num_tokens, 2 * VALUE_HEADS]
    decay_log_ptr,  # [VALUE_HEADS]
    decay_bias_ptr,  # [VALUE_HEADS]
    norm_ptr,  # [VALUE_DIM]
    out_ptr,  # [num_tokens, VALUE_HEADS * VALUE_DIM] contiguous
    state_ptr,  # [num_states, VALUE_HEADS, KEY_DIM, VALUE_DIM], states state_stride * STRIDE_UNIT apart
    covered_ptr,  # [num_states, VALUE_HEADS], states covered_stride apart
    keys_ptr,  # [num_slots + 1, VALUE_HEADS, RING, KEY_DIM], slots and heads pending_stride and head_stride apart
    values_ptr,  # [num_slots + 1, VALUE_HEADS, RING, VALUE_DIM], likewise
    decays_ptr,  # [num_slots + 1, VALUE_HEADS, RING], likewise
    slots_ptr,
    starts_ptr,
    q_starts_ptr,
    places_ptr,
    qkv_stride,  # elements between tokens
    z_stride,
    gates_stride,
    state_stride,
    covered_stride,
    pending_stride,
    head_stride,
    places_stride,
    eps,
    scale,  # q's scale
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # neighbours among the value heads with the same key head
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    STEPS_ONLY: tl.constexpr,
    LAG: tl.constexpr,
    MOST_PENDING: tl.constexpr,
    RING: tl.constexpr,
    NORM_EPS: tl.constexpr,  # q's and k's
    BLOCK_K: tl.constexpr,  # power of two, at least KEY_DIM
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    row, head = tl.program_id(0) // VALUE_HEADS, tl.program_id(0) % VALUE_HEADS
    keys, values = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    first = tl.load(q_starts_ptr + row)
    end_token = tl.load(q_starts_ptr + row + 1)
    start = tl.load(starts_ptr + row)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    own = tl.load(places_ptr + slot * places_stride).to(tl.int64)
    decay_rate, decay_bias = tl.load(decay_log_ptr + head), tl.load(decay_bias_ptr + head)
    weight = tl.load(norm_ptr + values, mask=values < VALUE_DIM, other=0.0)
    fresh = start == 0
    if not STEPS_ONLY:
        prompt_end = tl.load(places_ptr + slot * places_stride + 1)
        skipped = tl.minimum(tl.maximum(prompt_end - start, 0), end_token - first)
        fresh = fresh & (skipped == 0)
        first += skipped
        start += skipped
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    end = start + end_token - first
    if (not STEPS_ONLY) & (start >= end):
        return

    covered_ptr += own * covered_stride + head
    at_state = own * state_stride * STRIDE_UNIT + head * (KEY_DIM * VALUE_DIM)
    at_state = state_ptr + at_state + keys[:, None] * VALUE_DIM + values[None, :]
    whole = (keys < KEY_DIM)[:, None] & (values < VALUE_DIM)[None, :]
    pending = slot * pending_stride + head * head_stride
    keys_ptr, values_ptr, decays_ptr = keys_ptr + pending, values_ptr + pending, decays_ptr + pending
    covered = tl.where(fresh, 0, tl.load(covered_ptr))
    matrix = tl.where(fresh, 0.0, tl.load(at_state, mask=whole, other=0.0))
    # The position at which the state is stored, or -1 if it is stored already.
    stored = tl.maximum(tl.maximum(covered, start - LAG), end - MOST_PENDING)
    stored = tl.where(fresh | (stored > covered), stored, -1)
    key, update, decay = _load_pending(
        keys_ptr, values_ptr, decays_ptr, covered, keys, values, KEY_DIM, VALUE_DIM, RING
    )
    for position in range(covered, start):
        next_key, next_update, next_decay = _load_pending(
            keys_ptr, values_ptr, decays_ptr, position + 1, keys, values, KEY_DIM, VALUE_DIM, RING
        )
        if position == stored:
            tl.store(at_state, matrix, mask=whole)
            tl.store(covered_ptr, stored)
        matrix = _updated(matrix * decay, key, update)
        key, update, decay = next_key, next_update, next_decay
    tl.debug_barrier()  # the ring was read before it is written
    if STEPS_ONLY and PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    if start >= end:
        return
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    q, k, v, b, a, z = _load_token(
        qkv_ptr, gates_ptr, z_ptr, first, head, keys, values, qkv_stride, gates_stride, z_stride,
        KEY_HEADS, GROUP, VALUE_HEADS, KEY_DIM, VALUE_DIM,
    )  # fmt: skip
    for position in range(start, end):
        token = first + position - start
        next_q, next_k, next_v, next_b, next_a, next_z = _load_token(
            qkv_ptr, gates_ptr, z_ptr, tl.minimum(token + 1, end_token - 1), head, keys, values, qkv_stride,
            gates_stride, z_stride, KEY_HEADS, GROUP, VALUE_HEADS, KEY_DIM, VALUE_DIM,
        )  # fmt: skip
        if position == stored:
            tl.store(at_state, matrix, mask=whole)
            tl.store(covered_ptr, stored)
        decay = tl.exp(log_decay(a, decay_rate, decay_bias))
        matrix *= decay
        # Sums are taken together, so that the program's threads meet once for each kind.
        sums = tl.reshape(tl.sum(tl.join(tl.join(q * q, k * k), tl.join(q * k, q * k)), axis=0), (4,))
        q_square = tl.sum(tl.where(tl.arange(0, 4) == 0, sums, 0.0), axis=0)
        q_k = tl.sum(tl.where(tl.arange(0, 4) == 1, sums, 0.0), axis=0)
        k_square = tl.sum(tl.where(tl.arange(0, 4) == 2, sums, 0.0), axis=0)
        q_product, k_product = tl.split(tl.sum(tl.join(matrix * q[:, None], matrix * k[:, None]), axis=0))
        q_scale, k_scale = scale / tl.sqrt(q_square + NORM_EPS), 1.0 / tl.sqrt(k_square + NORM_EPS)
        update = (v - k_product * k_scale) / (1.0 + tl.exp(-b))
        out = ((q_product + (q_k * k_scale) * update) * q_scale).to(DTYPE)
        k *= k_scale
        matrix = _updated(matrix, k, update)
        place = position & (RING - 1)
        tl.store(keys_ptr + place * KEY_DIM + keys, k, mask=keys < KEY_DIM)
        tl.store(values_ptr + place * VALUE_DIM + values, update, mask=values < VALUE_DIM)
        tl.store(decays_ptr + place, decay)
        wide = out.to(tl.float32)
        normed = gated_norm(out, tl.sum(wide * wide, axis=0), z, weight, eps, VALUE_DIM, DTYPE).to(DTYPE)
        at_out = out_ptr + token.to(tl.int64) * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + values
        tl.store(at_out, normed, mask=values < VALUE_DIM)
        q, k, v, b, a, z = next_q, next_k, next_v, next_b, next_a, next_z


def launch_steps(
    qkv: torch.Tensor,
    z: torch.Tensor,
    gates: torch.Tensor,
    form: DeltaForm,
    rows: StateRows,
    state: DeltaState,
    out: torch.Tensor,  # [num_tokens, value_heads * value_dim] contiguous; the step tokens' rows are written
) -> None:
    """The step tokens of `delta_rule_torch`."""
    (_, value_heads, key_dim, value_dim), (decay_log, decay_bias, norm_weight, eps, tiled) = state.state.shape, form
    key_heads = (qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    group = 1 if tiled else value_heads // key_heads
    unit, pdl = stride_unit(state), use_pdl(qkv)
    assert state.keys.stride(0) == state.values.stride(0) == state.decays.stride(0)
    _delta_steps_kernel[(rows.num_rows * value_heads,)](
        qkv, z, gates, decay_log, decay_bias, norm_weight, out,
        state.state, state.positions, state.keys, state.values, state.decays,
        rows.slots, rows.starts, rows.q_starts, rows.places,
        qkv.stride(0), z.stride(0), gates.stride(0), state.state.stride(0) // unit, state.positions.stride(0),
        state.keys.stride(0), state.keys.stride(1), rows.places.stride(0), eps, key_dim**-0.5,
        KEY_HEADS=key_heads, GROUP=group, VALUE_HEADS=value_heads, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        STRIDE_UNIT=unit, STEPS_ONLY=rows.steps_only, LAG=LAG, MOST_PENDING=MOST_PENDING, RING=RING,
        NORM_EPS=NORM_EPS,
        BLOCK_K=next_power_of_2(key_dim), BLOCK_V=next_power_of_2(value_dim), PDL=pdl,
        launch_pdl=pdl, num_warps=4,
    )  # fmt: skip


def stride_unit(state: DeltaState) -> int:
    """Elements between states are a multiple of this. A kernel then knows that it may read 16 bytes at a time."""
    return 4 if state.state.stride(0) % 4 == 0 else 1
