"""The gated delta rule (arXiv 2412.06464): the torch twins of its two forms.

For each value head, with the state S [key_dim, value_dim], a token's decay a = exp(g) and rate b:

    S = a * S + outer(k, b * (v - (a * S)^T k))        o = S^T q

`delta_steps` applies this token after token. `delta_chunks` computes CHUNK tokens at once in the WY representation
(arXiv 2406.06484, section 3): the updates u of a chunk solve a triangular system, and then

    o_i = A_i * S^T q_i + sum over j <= i of (A_i / A_j) (q_i . k_j) u_j,      A_i = a_1 * ... * a_i

The results of both forms differ in their last bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.base.kv_cache_spec import CHUNK, RING
from runtime.kernels.exact_functions import sigmoid, silu, softplus
from runtime.kernels.step.state_rows import MOST_PENDING, DeltaForm, DeltaState, StateRows

NORM_EPS = 1e-6  # q's and k's


def delta_rule_torch(
    qkv: torch.Tensor,  # [num_tokens, 2 * key_heads * key_dim + value_heads * value_dim], after the convolution
    z: torch.Tensor,  # [num_tokens, value_heads * value_dim] output gate
    gates: torch.Tensor,  # [num_tokens, 2 * value_heads]: logits for the rate, then the decay
    form: DeltaForm,
    rows: StateRows,
    state: DeltaState,
) -> torch.Tensor:
    """norm(o) * norm_weight * silu(z), [num_tokens, value_heads * value_dim] in qkv's dtype.

    Value head h has the key head h * key_heads // value_heads, or with `tiled` h % key_heads."""
    (_, value_heads, key_dim, value_dim), (decay_log, decay_bias, norm_weight, eps, tiled) = state.state.shape, form
    key_heads = (qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    parts = qkv.float().split([key_heads * key_dim] * 2 + [value_heads * value_dim], 1)
    group = value_heads // key_heads
    q, k = (_normalized(part.view(-1, key_heads, key_dim)) for part in parts[:2])
    q, k = (x.repeat(1, group, 1) if tiled else x.repeat_interleave(group, 1) for x in (q, k))
    q, v = q * key_dim**-0.5, parts[2].view(-1, value_heads, value_dim)
    b, a = gates.float().chunk(2, 1)
    rates, logs = sigmoid(b), -decay_log.exp() * softplus(a + decay_bias)
    out, edges = torch.empty_like(v), rows.q_starts.tolist()
    for row, (slot, start) in enumerate(zip(rows.slots.tolist(), rows.starts.tolist(), strict=True)):
        own, prompt_end, snapshot_end, snapshot = rows.places[slot].tolist()
        begin, end = edges[row], edges[row + 1]
        inputs = [x[begin:end] for x in (q, k, v, rates, logs)]
        middle = 0 if rows.steps_only else min(max(prompt_end - start, 0), end - begin)
        if start == 0:
            state.state[own], state.positions[own] = 0, 0
        if middle:
            saved = snapshot if start < snapshot_end <= start + middle else None
            out[begin : begin + middle] = delta_chunks(
                [x[:middle] for x in inputs], start, state, own, snapshot_end, saved
            )
        if middle < end - begin:
            out[begin + middle : end] = delta_steps([x[middle:] for x in inputs], start + middle, state, own, slot)
    normed = out.to(qkv.dtype).float()
    normed = normed / torch.sqrt(normed.square().mean(-1, keepdim=True) + eps)
    normed = (norm_weight * normed.to(qkv.dtype)).float() * silu(z.float().view(out.shape))
    return normed.to(qkv.dtype).flatten(1)


def delta_steps(inputs: list[torch.Tensor], start: int, state: DeltaState, own: int, slot: int) -> torch.Tensor:
    """[count, value_heads, value_dim] of q, k, v, rates and log decays [count, value_heads, ...] from `start` on.

    Updates enter the ring. The state gets the updates that no later row can reject."""
    q, k, v, rates, logs = inputs
    end, at = start + len(q), int(state.positions[own, 0])
    stored, matrix, outputs = max(at, start - 1, end - MOST_PENDING), state.state[own], torch.empty_like(v)
    for position in range(at, end):
        if position == stored:
            state.state[own], state.positions[own] = matrix, stored
        place, i = position % RING, position - start
        if i >= 0:
            decay = logs[i].exp()
            matrix = decay[:, None, None] * matrix
            update = rates[i][:, None] * (v[i] - (matrix * k[i][:, :, None]).sum(1))
            state.keys[slot, :, place], state.values[slot, :, place] = k[i], update
            state.decays[slot, :, place] = decay
        else:
            update, matrix = state.values[slot, :, place], state.decays[slot, :, place][:, None, None] * matrix
        matrix = matrix + state.keys[slot, :, place][:, :, None] * update[:, None, :]
        if i >= 0:
            outputs[i] = (matrix * q[i][:, :, None]).sum(1)
    return outputs


def delta_chunks(
    inputs: list[torch.Tensor], start: int, state: DeltaState, own: int, snapshot_end: int, snapshot: int | None
) -> torch.Tensor:
    """Do the same as `delta_steps` for a prompt's tokens; `start` is a multiple of CHUNK. The state gets all tokens.

    The state at `snapshot_end` is also stored as `snapshot`, unless that is None. Each chunk is computed in the same
    shape, so that its bits do not depend on the row."""
    matrix, outputs, count = state.state[own], [], len(inputs[0])
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=matrix.device).tril()
    for first in range(0, count, CHUNK):
        size = min(CHUNK, count - first)
        padded = [F.pad(x[first : first + size].movedim(0, -1), (0, CHUNK - size)) for x in inputs]
        q, k, v = (x.transpose(1, 2) for x in padded[:3])  # [value_heads, CHUNK, dim]
        rates, sums = padded[3], padded[4].cumsum(-1)
        # Products are float32 and equally precise: log sums are below zero, so no exponent overflows.
        ratios = (sums[:, :, None] - sums[:, None, :]).masked_fill(~lower, -torch.inf).exp()
        within = (k @ k.transpose(1, 2)) * ratios * rates[:, :, None]
        system = torch.eye(CHUNK, device=matrix.device) + within.tril(-1)
        wanted = rates[:, :, None] * (v - sums.exp()[:, :, None] * (k @ matrix))
        updates = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        scores = (q @ k.transpose(1, 2)) * ratios
        outputs.append((sums.exp()[:, :, None] * (q @ matrix) + scores @ updates).transpose(0, 1)[:size])
        rest = (sums[:, -1:] - sums).exp()[:, :, None]
        matrix = sums[:, -1].exp()[:, None, None] * matrix + (k * rest).transpose(1, 2) @ updates
        if snapshot is not None and start + first + size == snapshot_end:
            state.state[snapshot], state.positions[snapshot] = matrix, snapshot_end
    state.state[own], state.positions[own] = matrix, start + count
    return torch.cat(outputs)


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
