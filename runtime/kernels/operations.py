"""The operations of a decoder: each has a torch reference and, where it exists, a Triton kernel."""

from __future__ import annotations

from typing import Any

import torch

from runtime.kernels.attention.attention_torch import attention_exact, attention_torch
from runtime.kernels.attention.latent_attention import latent_attention_triton
from runtime.kernels.attention.latent_store import latent_store_triton
from runtime.kernels.attention.latent_torch import (
    latent_attention_exact,
    latent_attention_torch,
    latent_store_torch,
    latent_up,
    latent_up_of_maps,
)
from runtime.kernels.attention.output_gate import gate_output_torch, gate_output_triton
from runtime.kernels.attention.paged_attention import AttentionForm
from runtime.kernels.attention.prefill_attention import attention_triton
from runtime.kernels.attention.rope import (
    rope_rows_torch,
    rope_rows_triton,
    rope_store_kv_torch,
    rope_store_kv_triton,
)
from runtime.kernels.linear.linear_torch import lookup_torch, soft_cap_torch
from runtime.kernels.linear.lora import add_adapters_exact, add_adapters_torch, add_adapters_triton
from runtime.kernels.norm.gated_activation import (
    gated_activation_exact,
    gated_activation_torch,
    gated_activation_triton,
)
from runtime.kernels.norm.layer_norm import layer_norm_torch, layer_norm_triton
from runtime.kernels.norm.rms_norm import (
    rms_norm_in_place_torch,
    rms_norm_in_place_triton,
    rms_norm_torch,
    rms_norm_triton,
)
from runtime.kernels.operation import Operation
from runtime.kernels.states.operations import CAUSAL_CONV, DELTA_RULE, SHORT_CONV  # noqa: F401 - for OPERATIONS

_T = torch.Tensor

RMS_NORM = Operation(rms_norm_torch, triton=rms_norm_triton)
LAYER_NORM = Operation(layer_norm_torch, triton=layer_norm_triton)
NORM_IN_PLACE = Operation(rms_norm_in_place_torch, triton=rms_norm_in_place_triton)
GATED_ACTIVATION = Operation(gated_activation_torch, exact=gated_activation_exact, triton=gated_activation_triton)
ROPE_ROWS = Operation(rope_rows_torch, triton=rope_rows_triton)
ROPE_STORE_KV = Operation(rope_store_kv_torch, triton=rope_store_kv_triton)
# A backend has its own type of a plan: its steps create it and its attention reads it.
ATTENTION: Operation[[_T, _T, Any, AttentionForm, _T | None], _T] = Operation(
    attention_torch, exact=attention_exact, triton=attention_triton
)
GATE_OUTPUT = Operation(gate_output_torch, triton=gate_output_triton)
LATENT_UP: Operation[[_T, int], Any] = Operation(latent_up)
LATENT_UP_OF_MAPS: Operation[[Any, Any, int], Any] = Operation(latent_up_of_maps)
LATENT_STORE = Operation(latent_store_torch, triton=latent_store_triton)
LATENT_ATTENTION: Operation[[_T, _T, Any, Any, float, int], _T] = Operation(
    latent_attention_torch, exact=latent_attention_exact, triton=latent_attention_triton
)
ADD_ADAPTERS = Operation(add_adapters_torch, exact=add_adapters_exact, triton=add_adapters_triton)
LOOKUP: Operation[[Any, _T, float], _T] = Operation(lookup_torch)
ZEROS_LIKE = Operation(torch.zeros_like)
MULTIPLY = Operation(torch.Tensor.mul_)
SOFT_CAP = Operation(soft_cap_torch)

OPERATIONS: tuple[Operation[..., Any], ...] = tuple(each for each in globals().values() if isinstance(each, Operation))
