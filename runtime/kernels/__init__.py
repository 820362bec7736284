"""The operations of the model, each with a torch reference and, where it exists, a Triton kernel of the same signature.

`select` is the only place that knows which is used (C7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from runtime.kernels.attention import attention_exact, attention_torch
from runtime.kernels.decode_attention import decode_attention
from runtime.kernels.fused_linear import FusedLinear
from runtime.kernels.gated_activation import (
    Activation,
    gated_activation_exact,
    gated_activation_torch,
)
from runtime.kernels.linear import Linear, cpu_product
from runtime.kernels.paged_attention import PagedRows
from runtime.kernels.prefill_attention import prefill_attention
from runtime.kernels.rms_norm import rms_norm_torch
from runtime.kernels.rope import rope_rows_torch, rope_rows_triton, rope_store_kv_torch, rope_store_kv_triton


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a decoder is written with; signatures are those of the torch references."""

    linear: Callable[[torch.Tensor, torch.Tensor | None], Linear]  # of weight [out, in] and bias [out]
    rope_rows: Callable  # (rotary table, positions) -> what rope_store_kv wants of a step
    rope_store_kv: Callable
    attention: Callable


def select(
    backend: Literal["torch", "triton"], packed: bool, deterministic: bool, activation: Activation = "silu"
) -> Kernels:
    """The operations of a backend. Deterministic ones give a row the same bits whatever the other rows are."""
    if backend == "triton":
        linear: Callable = partial(FusedLinear, activation=activation, deterministic=deterministic)
        attention: Callable = partial(_attend, deterministic=deterministic)
        return Kernels(linear, rope_rows_triton, rope_store_kv_triton, attention)
    activate = partial(gated_activation_exact if deterministic else gated_activation_torch, activation=activation)

    def plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return Linear(cpu_product(weight, bias, packed, deterministic), rms_norm_torch, activate)

    attention = attention_exact if deterministic else attention_torch
    return Kernels(plain, rope_rows_torch, rope_store_kv_torch, attention)


def _attend(q: torch.Tensor, kv: torch.Tensor, parts: list[PagedRows], deterministic: bool) -> torch.Tensor:
    """[num_tokens, num_heads * head_dim]: rows of one token, or of guesses in a graph, and longer ones, whose
    tokens follow each other in q. Other short rows do not take the first kernel: each length would compile it anew."""
    out = q.new_empty(len(q), q.shape[1] * q.shape[2])
    at = 0
    for rows in parts:
        end = at + rows.num_tokens
        attend = decode_attention if rows.max_count == 1 or rows.settled else prefill_attention
        attend(q[at:end], kv, rows, scale=q.shape[2] ** -0.5, deterministic=deterministic, out=out[at:end])
        at = end
    return out
