"""Attention's output gate: the twin of `gate_output_torch`, for float32 rows."""

from __future__ import annotations

from runtime.kernels.cpu.attention.stored_numbers import LANES
from runtime.kernels.llvm.language import F32s, Int, loop, share
from runtime.kernels.llvm.mathematics import sigmoid


def gate_output(
    out: F32s,  # [num_tokens, columns]
    gate: F32s,  # [num_tokens, columns], rows gate_stride apart
    num_tokens: Int,
    columns: Int,
    gate_stride: Int,
    part: Int,
    parts: Int,
) -> None:
    """out *= sigmoid(gate). Part i/n: a share of the tokens."""
    whole = columns // LANES * LANES
    for token in loop(*share(num_tokens, part, parts)):
        own, own_gate = out + token * columns, gate + token * gate_stride
        for lanes, first, last in ((LANES, 0, whole), (1, whole, columns)):
            for column in loop(first, last, lanes):
                own.store(column, own.load(column, lanes) * sigmoid(own_gate.load(column, lanes)))
