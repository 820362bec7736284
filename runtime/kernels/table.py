"""The table of operations: each has a torch reference and, where it exists, a Triton kernel of the same signature.

Only `select` decides which one runs (C7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import torch

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec
from runtime.kernels.attention.attention_torch import attention_exact, attention_torch
from runtime.kernels.attention.decode_attention import decode_attention
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
from runtime.kernels.attention.paged_attention import PagedBatch
from runtime.kernels.attention.prefill_attention import prefill_attention
from runtime.kernels.attention.rope import (
    Heads,
    rope_rows_torch,
    rope_rows_triton,
    rope_store_kv_torch,
    rope_store_kv_triton,
)
from runtime.kernels.experts.moe_fp8_w8a8 import Fp8Experts, has_fp8_moe
from runtime.kernels.experts.moe_torch import ExpertLayer, Experts, Mixture, Router, stacked_mixture
from runtime.kernels.experts.moe_w16a16 import GroupedExperts
from runtime.kernels.experts.moe_wna16 import QuantizedExperts
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.linear_torch import (
    Activate,
    Linear,
    Norm,
    Operands,
    Product,
    cpu_product,
    lookup_torch,
    soft_cap_torch,
)
from runtime.kernels.linear.lora import AddAdapters, add_adapters_torch, add_adapters_triton
from runtime.kernels.norm.gated_activation import (
    Activation,
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
from runtime.kernels.numerics import Numerics
from runtime.kernels.quantized.fp8_w8a8_gemm import has_fp8_gemm
from runtime.kernels.quantized.int_wna16_gemm import has_int_wna16_gemm
from runtime.kernels.quantized.quantized_linear import Fp8Linear, Int16Linear, QuantizedLinear
from runtime.kernels.quantized.quantized_weight import QuantizedWeight
from runtime.kernels.sampling.token_keys import DrawnKeys, drawn_keys_torch
from runtime.kernels.sampling.top_k_top_p import FilterBounds, top_k_top_p_bounds_torch
from runtime.kernels.states.causal_conv import causal_conv_triton, short_conv_triton
from runtime.kernels.states.causal_conv_torch import causal_conv_torch, short_conv_torch
from runtime.kernels.states.delta_rule import delta_rule_triton
from runtime.kernels.states.delta_rule_torch import delta_rule_torch
from runtime.kernels.states.state_rows import ConvState, DeltaState, StateRows

if TYPE_CHECKING:  # they import llvmlite, which only CPUs need
    from runtime.kernels.cpu.operations import CompiledOperations
    from runtime.kernels.llvm.launcher import Launcher


class RopeStoreKV(Protocol):
    """`rope_store_kv_torch`."""

    def __call__(
        self,
        qkv: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        kv: torch.Tensor,
        kv_index: torch.Tensor,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
        scales: torch.Tensor | None = None,
        heads: Heads = "qkv",
        v_norm: bool = False,
    ) -> torch.Tensor: ...


class Attention(Protocol):
    """`attention_torch`; the plan's type belongs to the backend: its steps create it and its attention reads it."""

    def __call__(
        self,
        q: torch.Tensor,
        kv: torch.Tensor,
        plan: Any,
        scales: torch.Tensor | None = None,
        *,
        scale: float,
        window: int,
        soft_cap: float,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


class LatentStore(Protocol):
    """`latent_store_torch`."""

    def __call__(
        self,
        q: torch.Tensor,
        latents: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        norm: torch.Tensor,
        eps: float,
        kv: torch.Tensor,
        kv_index: torch.Tensor,
        interleaved: bool,
    ) -> None: ...


class LatentAttention(Protocol):
    """`latent_attention_torch`; the types of the plan and of kv_b belong to the backend."""

    def __call__(self, q: torch.Tensor, kv: torch.Tensor, plan: Any, up: Any, *, scale: float) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class LatentKernels:
    """The operations of latent attention."""

    store: LatentStore
    attention: LatentAttention
    up: Callable[[torch.Tensor, int], Any]  # kv_b, of a weight and the numbers of a head's k in it
    up_of_maps: Callable[[Any, Any, int], Any]  # `latent_up_of_maps` of operands


class DeltaRule(Protocol):
    """`delta_rule_torch`."""

    def __call__(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        gates: torch.Tensor,
        decay_log: torch.Tensor,
        decay_bias: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        rows: StateRows,
        state: DeltaState,
        tiled: bool = False,
    ) -> torch.Tensor: ...


class MakeExperts(Protocol):
    """A mixture from a router and the operands of each expert: gate and up as one, and down."""

    def __call__(
        self, spec: ExpertsSpec, router: Router, experts: Iterable[tuple[Operands, Operands]]
    ) -> ExpertLayer: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """The operations of a decoder, with the signatures of the torch references."""

    norm: Norm
    norm_in_place: Callable[[torch.Tensor, torch.Tensor, float], None]  # RMS norm of x with a weight and an epsilon
    activate: Activate  # of the feed-forward layer
    linear: Callable[[Sequence[Any], torch.Tensor | None], Linear]  # the arguments are `Operands`
    experts: MakeExperts
    rope_rows: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # of rotary table, positions
    rope_store_kv: RopeStoreKV
    attention: Attention
    add_adapters: AddAdapters
    # Of layers with a state: x, the weight and perhaps the bias of a convolution, the step's rows, the layer's state
    causal_conv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, StateRows, DeltaState], torch.Tensor]
    short_conv: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, StateRows, ConvState], torch.Tensor]
    delta_rule: DeltaRule
    gate_output: Callable[[torch.Tensor, torch.Tensor], object]  # attention's output and its gate
    latent: LatentKernels
    gate_by: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # activation(gate) * up of separate rows
    lookup: Callable[[Any, torch.Tensor, float], torch.Tensor] = lookup_torch  # of a table, ids and a factor
    zeros_like: Callable[[torch.Tensor], torch.Tensor] = torch.zeros_like
    multiply: Callable[[torch.Tensor, torch.Tensor], object] = torch.Tensor.mul_  # in place, with one number
    soft_cap: Callable[[torch.Tensor, float], torch.Tensor] = soft_cap_torch
    drawn_keys: DrawnKeys = drawn_keys_torch
    filter_bounds: FilterBounds = top_k_top_p_bounds_torch
    mixes_experts: bool = False  # the weights of a mixture's experts may differ in format
    launcher: Launcher | None = None  # runs the attention's compiled kernels; None if it is not compiled


def select(numerics: Numerics, spec: DecoderSpec) -> Kernels:
    """The operations of a backend. With `deterministic`, a row's bits do not depend on the other rows."""
    if numerics.backend == "triton":
        return _triton(numerics, spec)
    deterministic = numerics.deterministic
    norm: Norm = rms_norm_torch if spec.norm == "rms" else layer_norm_torch
    activate = partial(
        gated_activation_exact if deterministic else gated_activation_torch,
        activation=spec.ffn.activation,
        gated=spec.ffn.gated,
    )

    def product(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        return cpu_product(weight, bias, numerics.packed, deterministic)

    references = Kernels(
        norm,
        rms_norm_in_place_torch,
        activate,
        lambda weights, bias: Linear(product(weights[0], bias), norm, activate),
        partial(stacked_mixture, partial(Experts, product=product, activate=activate)),
        rope_rows_torch,
        rope_store_kv_torch,
        partial(attention_exact, by_head=numerics.rank_invariant) if deterministic else attention_torch,
        # Small matrices are packed for each call, because the reference is not batch-invariant otherwise.
        partial(add_adapters_torch, multiply=lambda x, weight: product(weight)(x))
        if deterministic
        else add_adapters_torch,
        causal_conv_torch,
        short_conv_torch,
        delta_rule_torch,
        gate_output_torch,
        LatentKernels(
            latent_store_torch,
            partial(latent_attention_exact, by_head=numerics.rank_invariant)
            if deterministic
            else latent_attention_torch,
            partial(latent_up, product=product if deterministic else None),
            partial(latent_up_of_maps, product=product if deterministic else None),
        ),
        lambda gate, up: activate(torch.cat((gate, up), 1)),
    )
    if numerics.backend != "llvm":
        return references
    from runtime.kernels.cpu.operations import CompiledOperations  # imports llvmlite, which only this backend needs

    return _llvm(references, CompiledOperations(numerics, spec, norm, activate, references.linear))


def _llvm(references: Kernels, compiled: CompiledOperations) -> Kernels:
    """The references with compiled kernels in place of what they compute."""
    if (attention := compiled.attention) is not None:
        references = replace(
            references,
            norm=compiled.rows.norm,
            norm_in_place=compiled.rows.norm_in_place,
            activate=compiled.rows.activate,
            gate_by=compiled.rows.gate_by,
            soft_cap=compiled.rows.soft_cap,
            multiply=compiled.rows.multiply,
            zeros_like=compiled.rows.zeros_like,
            rope_rows=rope_rows_triton,  # this kernel, too, reads its rows of the table
            rope_store_kv=attention.rope_store_kv,
            attention=attention.attention,
            gate_output=attention.gate_output,
            launcher=compiled.launcher,
        )
    if (latents := compiled.latents) is not None:
        operations = latents.store, latents.attention, latents.up, latents.up_of_maps
        references = replace(references, latent=LatentKernels(*operations))
    if (states := compiled.states) is not None:
        references = replace(
            references, causal_conv=states.causal_conv, short_conv=states.short_conv, delta_rule=states.delta_rule
        )
    return replace(
        references,
        linear=compiled.linear,
        lookup=compiled.lookup,
        experts=compiled.experts,
        mixes_experts=True,
        drawn_keys=compiled.drawn_keys,
        filter_bounds=compiled.filter_bounds,
    )


def _triton(numerics: Numerics, spec: DecoderSpec) -> Kernels:
    deterministic, activation, gated = numerics.deterministic, spec.ffn.activation, spec.ffn.gated
    norm: Norm = rms_norm_triton if spec.norm == "rms" else layer_norm_triton
    activate = partial(gated_activation_triton, activation=activation, gated=gated)
    chosen: dict[str, Any] = {"activation": activation, "deterministic": deterministic, "dtype": numerics.dtype}
    return Kernels(
        norm,
        rms_norm_in_place_triton,
        activate,
        partial(_linear, gated=gated, norm=norm, **chosen),
        partial(stacked_mixture, partial(_experts, **chosen)),
        rope_rows_triton,
        rope_store_kv_triton,
        partial(_attend, deterministic=deterministic),
        partial(add_adapters_triton, deterministic=deterministic),
        causal_conv_triton,
        short_conv_triton,
        delta_rule_triton,
        gate_output_triton,
        LatentKernels(
            latent_store_triton,
            partial(latent_attention_triton, deterministic=deterministic),
            latent_up,
            latent_up_of_maps,
        ),
        lambda gate, up: activate(torch.cat((gate, up), 1)),
    )


def _linear(
    weights: Sequence[torch.Tensor | QuantizedWeight],
    bias: torch.Tensor | None,
    deterministic: bool,
    dtype: torch.dtype,
    **around: Any,
) -> Linear:
    (weight,) = weights
    if isinstance(weight, torch.Tensor):
        return FusedLinear(weight, bias, deterministic=deterministic, **around)
    if not deterministic and dtype != torch.float32 and has_fp8_gemm(weight):
        return Fp8Linear(weight, bias, **around)
    if not deterministic and dtype != torch.float32 and has_int_wna16_gemm(weight):
        return Int16Linear(weight, bias, **around)
    return QuantizedLinear(weight, bias, deterministic=deterministic, **around)


def _experts(
    spec: ExpertsSpec,
    router: Router,
    weights: Iterable[tuple[Any, Any]],
    activation: Activation,
    deterministic: bool,
    dtype: torch.dtype,
) -> Mixture:
    pairs = iter(weights)
    first = next(pairs)
    kind: type[GroupedExperts | Fp8Experts | QuantizedExperts] = GroupedExperts
    if isinstance(first[0], QuantizedWeight):
        kind = Fp8Experts if dtype != torch.float32 and has_fp8_moe(first) else QuantizedExperts
    return kind(spec, router, chain([first], pairs), activation, deterministic)


def _attend(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    scales: torch.Tensor | None = None,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: torch.Tensor | None = None,
    deterministic: bool,
) -> torch.Tensor:
    """[num_tokens, num_heads * head_dim]. Rows of one token, and draft tokens in a graph, use decode attention.

    Other short rows do not, because each length would compile the kernel again."""
    out = q.new_empty(len(q), q.shape[1] * q.shape[2])
    for rows in batch.parts:
        attend = decode_attention if rows.max_count == 1 or rows.prefix_ready else prefill_attention
        attend(
            q, kv, rows, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, scales=scales,
            deterministic=deterministic, out=out,
        )  # fmt: skip
    return out
