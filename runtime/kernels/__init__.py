"""The operations of the model, each with a torch reference and, where it exists, a Triton kernel of the same signature.

`select` is the only place that knows which is used (C7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from runtime.kernels.attention import attention_exact, attention_torch
from runtime.kernels.gated_activation import (
    Activation,
    gated_activation_exact,
    gated_activation_torch,
    gated_activation_triton,
)
from runtime.kernels.linear import Linear, cpu_product
from runtime.kernels.rms_norm import rms_norm_torch, rms_norm_triton
from runtime.kernels.rope import rope_rows_torch, rope_rows_triton, rope_store_kv_torch, rope_store_kv_triton


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a decoder is written with; signatures are those of the torch references."""

    linear: Callable[[torch.Tensor, torch.Tensor | None], Linear]  # of weight [out, in] and bias [out]
    rms_norm: Callable
    rope_rows: Callable  # (rotary table, positions) -> what rope_store_kv wants of a step
    rope_store_kv: Callable
    attention: Callable


def select(
    backend: Literal["torch", "triton"], packed: bool, deterministic: bool, activation: Activation = "silu"
) -> Kernels:
    """The operations of a backend. Deterministic ones give a row the same bits whatever the other rows are."""
    attention = attention_exact if deterministic else attention_torch
    if backend == "triton":
        rms_norm, rope_rows, rope_store_kv = rms_norm_triton, rope_rows_triton, rope_store_kv_triton
        gated_activation = gated_activation_triton
    else:
        rms_norm, rope_rows, rope_store_kv = rms_norm_torch, rope_rows_torch, rope_store_kv_torch
        gated_activation = gated_activation_exact if deterministic else gated_activation_torch
    activate = partial(gated_activation, activation=activation)

    def linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return Linear(cpu_product(weight, bias, packed, deterministic), rms_norm, activate)

    return Kernels(linear, rms_norm, rope_rows, rope_store_kv, attention)
