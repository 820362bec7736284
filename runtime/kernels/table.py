"""Kernels: a decoder's operations in one backend, and the makers of its linear layers.

Only `select` decides which implementation runs (C7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec
from runtime.kernels import operations as ops
from runtime.kernels.experts.moe_fp8_w8a8 import Fp8Experts, has_fp8_moe
from runtime.kernels.experts.moe_torch import ExpertLayer, Experts, Mixture, Router, stacked_mixture
from runtime.kernels.experts.moe_w16a16 import GroupedExperts
from runtime.kernels.experts.moe_wna16 import QuantizedExperts
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.linear_torch import Activate, Linear, Norm, Operands, Product, cpu_product
from runtime.kernels.norm.gated_activation import Activation
from runtime.kernels.numerics import Numerics
from runtime.kernels.operation import Operation, P, R
from runtime.kernels.quantized.fp8_w8a8_gemm import has_fp8_gemm
from runtime.kernels.quantized.int_wna16_gemm import has_int_wna16_gemm
from runtime.kernels.quantized.quantized_linear import Fp8Linear, Int16Linear, QuantizedLinear
from runtime.kernels.quantized.quantized_weight import QuantizedWeight
from runtime.kernels.sampling.token_keys import DrawnKeys, drawn_keys_torch
from runtime.kernels.sampling.top_k_top_p import FilterBounds, top_k_top_p_bounds_torch

if TYPE_CHECKING:  # they import llvmlite, which only CPUs need
    from runtime.kernels.cpu.operations import CompiledOperations
    from runtime.kernels.llvm.launcher import Launcher

# A mixture from a router and the operands of each expert: gate and up as one, and down.
MakeExperts = Callable[[ExpertsSpec, Router, Iterable[tuple[Operands, Operands]]], ExpertLayer]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The implementation of each operation (`kernels[ATTENTION]`), and the makers of layers."""

    table: Mapping[Operation[..., Any], Callable[..., Any]]
    norm: Norm  # of the model's kind
    activate: Activate  # of the feed-forward layer
    gate_by: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # activation(gate) * up of separate rows
    linear: Callable[[Sequence[Any], torch.Tensor | None], Linear]  # the arguments are `Operands`
    experts: MakeExperts
    drawn_keys: DrawnKeys = drawn_keys_torch
    filter_bounds: FilterBounds = top_k_top_p_bounds_torch
    mixes_experts: bool = False  # the weights of a mixture's experts may differ in format
    launcher: Launcher | None = None  # runs the attention's compiled kernels; None if it is not compiled

    def __getitem__(self, operation: Operation[P, R]) -> Callable[P, R]:
        return self.table[operation]


def select(numerics: Numerics, spec: DecoderSpec) -> Kernels:
    """The operations of a backend. With `deterministic`, a row's bits do not depend on the other rows."""
    deterministic, on_gpu, ffn = numerics.deterministic, numerics.backend == "triton", spec.ffn

    def product(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Product:
        return cpu_product(weight, bias, numerics.packed, deterministic)

    settings = {
        "deterministic": deterministic, "by_head": numerics.rank_invariant, "activation": ffn.activation,
        "gated": ffn.gated, "product": product if deterministic and not on_gpu else None,
    }  # fmt: skip
    table = {each: each.implementation(numerics.backend, settings) for each in ops.OPERATIONS}
    norm: Norm = table[ops.RMS_NORM if spec.norm == "rms" else ops.LAYER_NORM]
    activate: Activate = table[ops.GATED_ACTIVATION]
    shared = table, norm, activate, lambda gate, up: activate(torch.cat((gate, up), 1))
    if on_gpu:
        chosen: dict[str, Any] = {
            "activation": ffn.activation, "deterministic": deterministic, "dtype": numerics.dtype
        }  # fmt: skip
        linear = partial(_linear, gated=ffn.gated, norm=norm, **chosen)
        return Kernels(*shared, linear, partial(stacked_mixture, partial(_experts, **chosen)))
    references = Kernels(
        *shared,
        lambda weights, bias: Linear(product(weights[0], bias), norm, activate),
        partial(stacked_mixture, partial(Experts, product=product, activate=activate)),
    )
    if numerics.backend != "llvm":
        return references
    from runtime.kernels.cpu.operations import CompiledOperations  # imports llvmlite, which only this backend needs

    return _llvm(references, CompiledOperations(numerics, spec, norm, activate, references.linear))


def _llvm(references: Kernels, compiled: CompiledOperations) -> Kernels:
    """The references with compiled kernels in place of what they compute."""
    kernels = replace(
        references,
        table={**references.table, **compiled.implementations()},
        linear=compiled.linear,
        experts=compiled.experts,
        mixes_experts=True,
        drawn_keys=compiled.drawn_keys,
        filter_bounds=compiled.filter_bounds,
    )
    if compiled.attention is None:
        return kernels
    rows = compiled.rows
    return replace(kernels, norm=rows.norm, activate=rows.activate, gate_by=rows.gate_by, launcher=compiled.launcher)


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
