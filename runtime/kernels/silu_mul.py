"""The gated activation of the feed-forward layer: silu(gate) * up."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """[num_tokens, 2 * ffn] -> [num_tokens, ffn]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def silu_mul_exact(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu_mul_torch` whose bits do not depend on the number of rows: F.silu's vector body and scalar tail differ in
    the last bit, and where the tail falls depends on how threads share the rows; exp's do not, and the rest is exactly
    rounded."""
    gate, up = gate_up.float().chunk(2, -1)
    return (gate / gate.neg().exp_().add_(1.0)).mul_(up).to(gate_up.dtype)
