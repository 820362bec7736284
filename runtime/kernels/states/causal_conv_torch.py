"""Causal depthwise convolutions over a request's tokens: the torch twins.

Channel c's output t is the sum over w: weight[c, w] * x[t - width + 1 + w, c], with zeros before position 0."""

from __future__ import annotations

import torch

from runtime.base.kv_cache_spec import RING
from runtime.kernels.exact_functions import silu
from runtime.kernels.step.state_rows import ConvState, DeltaState, StateRows


def causal_conv_torch(
    x: torch.Tensor,  # [num_tokens, channels], any stride between tokens
    weight: torch.Tensor,  # [channels, width]
    bias: torch.Tensor | None,  # [channels]
    rows: StateRows,
    state: ConvState | DeltaState,
) -> torch.Tensor:
    """silu of the convolution, [num_tokens, channels] in x's dtype. The last inputs enter the ring, and the snapshot's
    ring."""
    return silu(_convolved(x, weight, bias, rows, state)).to(x.dtype)


def short_conv_torch(
    gates_and_x: torch.Tensor,  # [num_tokens, 3 * channels]: input gate, output gate, x
    weight: torch.Tensor,  # [channels, width]
    bias: torch.Tensor | None,
    rows: StateRows,
    state: ConvState,
) -> torch.Tensor:
    """output gate * convolution(input gate * x), [num_tokens, channels] (LFM2)."""
    input_gate, output_gate, x = gates_and_x.chunk(3, -1)
    return output_gate * _convolved(input_gate * x, weight, bias, rows, state).to(x.dtype)


def _convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: StateRows, state: ConvState | DeltaState
) -> torch.Tensor:
    """The convolution in float32, a row of the step after another."""
    width, edges, out = weight.shape[1], rows.q_starts.tolist(), x.new_empty(x.shape, dtype=torch.float32)
    taps = weight.float().unbind(1)
    for row, (slot, start) in enumerate(zip(rows.slots.tolist(), rows.starts.tolist(), strict=True)):
        own, _, snapshot_end, snapshot = rows.places[slot].tolist()
        begin, end = edges[row], edges[row + 1]
        before = torch.arange(start - width + 1, start, device=x.device)
        earlier = state.inputs[own, before % RING].masked_fill((before < 0)[:, None], 0)
        known = torch.cat((earlier.to(x.dtype), x[begin:end]))  # begins at position start - width + 1
        total = torch.zeros_like(out[begin:end]) if bias is None else bias.float().expand(end - begin, -1)
        for w, tap in enumerate(taps):
            total = total + known[w : w + end - begin].float() * tap
        out[begin:end] = total
        stop = start + end - begin
        for target, last in ((own, stop), (snapshot, snapshot_end)):
            if target == own or start < last <= stop:
                kept = torch.arange(max(last - RING, start - width + 1, 0), last, device=x.device)
                state.inputs[target, kept % RING] = known[kept - start + width - 1].to(state.inputs.dtype)
    return out
