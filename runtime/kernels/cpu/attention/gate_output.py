"""The gate of attention's output, for float32 rows."""

from __future__ import annotations

from runtime.kernels.cpu.attention.stored_numbers import load_part, store_part, vectors
from runtime.kernels.llvm.language import F32s, Int, loop, share
from runtime.kernels.llvm.mathematics import sigmoid


def gate_output(
    x: F32s,  # [num_tokens, num_heads, head_dim]
    gate: F32s,  # [num_tokens, num_heads, head_dim], tokens token_stride apart and heads head_stride apart
    out: F32s,  # [num_tokens, num_heads, head_dim]; may be x
    num_tokens: Int,
    num_heads: Int,
    token_stride: Int,
    head_stride: Int,
    part: Int,
    parts: Int,
    head_dim: int,
) -> None:
    """out = x * sigmoid(gate). Part i of n: a share of the pairs of a token and a head."""
    begin, end = share(num_tokens * num_heads, part, parts)
    for task in loop(begin, end):
        own_gate = gate + (task // num_heads * token_stride + task % num_heads * head_stride)
        own, result = x + task * head_dim, out + task * head_dim
        for first, count in vectors(head_dim):
            numbers = load_part(own + first, 0, count) * sigmoid(load_part(own_gate + first, 0, count))
            store_part(result + first, 0, numbers, count)
