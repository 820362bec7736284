"""The operations of the model, each with a torch reference and, where it exists, a Triton kernel of the same signature.

`select` is the only place that knows which is used (C7)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from runtime.core.decoder_spec import DecoderSpec
from runtime.kernels.attention import attention_exact, attention_torch
from runtime.kernels.decode_attention import decode_attention
from runtime.kernels.experts import Experts, GroupedExperts
from runtime.kernels.fused_linear import FusedLinear
from runtime.kernels.gated_activation import gated_activation_exact, gated_activation_torch
from runtime.kernels.layer_norm import layer_norm_torch, layer_norm_triton
from runtime.kernels.linear import Linear, Product, cpu_product
from runtime.kernels.paged_attention import PagedRows
from runtime.kernels.prefill_attention import prefill_attention
from runtime.kernels.rms_norm import rms_norm_torch, rms_norm_triton
from runtime.kernels.rope import rope_rows_torch, rope_rows_triton, rope_store_kv_torch, rope_store_kv_triton


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a decoder is written with; signatures are those of the torch references."""

    norm: Callable
    linear: Callable[[torch.Tensor, torch.Tensor | None], Linear]  # of weight [out, in] and bias [out]
    experts: Callable  # (spec, router, weights of the experts) -> Experts
    rope_rows: Callable  # (rotary table, positions) -> what rope_store_kv wants of a step
    rope_store_kv: Callable
    attention: Callable


def select(backend: Literal["torch", "triton"], packed: bool, deterministic: bool, spec: DecoderSpec) -> Kernels:
    """The operations of a backend. Deterministic ones give a row the same bits whatever the other rows are."""
    options = {"activation": spec.activation, "gated": spec.gated}
    if backend == "triton":
        norm = rms_norm_triton if spec.norm == "rms" else layer_norm_triton
        linear: Callable = partial(FusedLinear, deterministic=deterministic, norm=norm, **options)
        experts: Callable = partial(GroupedExperts, activation=spec.activation, deterministic=deterministic)
        attention: Callable = partial(_attend, deterministic=deterministic)
        return Kernels(norm, linear, experts, rope_rows_triton, rope_store_kv_triton, attention)
    norm = rms_norm_torch if spec.norm == "rms" else layer_norm_torch
    activate = partial(gated_activation_exact if deterministic else gated_activation_torch, **options)

    def product(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        return cpu_product(weight, bias, packed, deterministic)

    def plain(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return Linear(product(weight, bias), norm, activate)

    experts = partial(Experts, product=product, activate=activate)
    attention = attention_exact if deterministic else attention_torch
    return Kernels(norm, plain, experts, rope_rows_torch, rope_store_kv_torch, attention)


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    parts: list[PagedRows],
    *,
    scale: float,
    window: int,
    soft_cap: float,
    deterministic: bool,
) -> torch.Tensor:
    """[num_tokens, num_heads * head_dim]: rows of one token, or of guesses in a graph, and longer ones, whose
    tokens follow each other in q. Other short rows do not take the first kernel: each length would compile it anew."""
    out = q.new_empty(len(q), q.shape[1] * q.shape[2])
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "deterministic": deterministic}
    at = 0
    for rows in parts:
        end = at + rows.num_tokens
        attend = decode_attention if rows.max_count == 1 or rows.prefix_ready else prefill_attention
        attend(q[at:end], kv, rows, out=out[at:end], **options)
        at = end
    return out
