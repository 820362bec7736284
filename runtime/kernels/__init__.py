"""The operations of the model, each with a torch reference and, where it exists, a Triton kernel of the same signature.

`select` is the only place that knows which is used (C7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from runtime.kernels.attention import attention_exact, attention_torch
from runtime.kernels.rms_norm import rms_norm_torch, rms_norm_triton
from runtime.kernels.rope import rope_store_kv_torch, rope_store_kv_triton
from runtime.kernels.silu_mul import silu_mul_exact, silu_mul_torch, silu_mul_triton


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a decoder is written with; signatures are those of the torch references."""

    rms_norm: Callable
    rope_store_kv: Callable
    attention: Callable
    silu_mul: Callable


def select(backend: Literal["torch", "triton"], deterministic: bool) -> Kernels:
    """The operations of a backend. Deterministic ones give a row the same bits whatever the other rows are."""
    attention = attention_exact if deterministic else attention_torch
    if backend == "triton":
        return Kernels(rms_norm_triton, rope_store_kv_triton, attention, silu_mul_triton)
    return Kernels(rms_norm_torch, rope_store_kv_torch, attention, silu_mul_exact if deterministic else silu_mul_torch)
