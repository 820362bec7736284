"""The operations of a decoder as compiled kernels of a CPU (`kernel_backend` llvm)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from runtime.kernels.attention.rope import rope_rows_triton
from runtime.kernels.cpu.compiled_attention import CompiledAttention
from runtime.kernels.cpu.draw import TILE, draw
from runtime.kernels.cpu.filters import top_k_top_p_bounds
from runtime.kernels.cpu.interleaved_linear import InterleavedLinear
from runtime.kernels.cpu.interleaved_weight import InterleavedWeight
from runtime.kernels.cpu.launcher import Launcher, kernel
from runtime.kernels.cpu.lookup import lookup
from runtime.kernels.numerics import Numerics
from runtime.kernels.table import CompiledKernels, Kernels
from runtime.spec.decoder_spec import DecoderSpec


def compiled_operations(numerics: Numerics, spec: DecoderSpec, references: Kernels) -> Kernels:
    """The references, with compiled kernels in place of operations that have one."""
    launcher = Launcher()
    operations = _Operations(numerics, spec, launcher, references)
    attends = numerics.dtype == torch.float32
    if attends:
        around = CompiledAttention(launcher)
        references = replace(
            references, rope_rows=rope_rows_triton, rope_store_kv=around.rope_store_kv, attention=around.attention
        )
    return replace(
        references,
        interleaved_linear=operations.linear,
        interleaved_lookup=operations.lookup,
        compiled=CompiledKernels(launcher, operations.drawn_keys, partial(top_k_top_p_bounds, launcher), attends),
    )


class _Operations:
    """Operations that share a launcher."""

    def __init__(self, numerics: Numerics, spec: DecoderSpec, launcher: Launcher, references: Kernels) -> None:
        self.numerics, self.spec, self.launcher, self.references = numerics, spec, launcher, references

    def linear(self, parts: Sequence[InterleavedWeight], bias: torch.Tensor | None) -> InterleavedLinear:
        references, spec = self.references, self.spec
        around = references.norm, references.activate, spec.activation, spec.gated
        return InterleavedLinear(parts, bias, self.launcher, *around, self.numerics.activation_bits // 8)

    def lookup(self, weight: InterleavedWeight, ids: torch.Tensor) -> torch.Tensor:
        """Dequantized rows of a weight, valid until the next lookup."""
        num_rows, columns = len(ids), weight.shape[1]
        out = self.launcher.buffer("rows", num_rows, columns)
        shared = weight.scales, weight.minimums, weight.super_scales, weight.super_minimums
        arguments = (weight.values, *shared, ids, out, num_rows, columns, 1.0)
        self.launcher.launch(
            kernel(lookup, form=weight.form), arguments, self.launcher.parts(num_rows, 16 * out.numel())
        )
        return out.to(self.numerics.dtype)

    def drawn_keys(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        first: int,
        checked: bool,
    ) -> torch.Tensor:
        """`drawn_keys_torch` as one kernel."""
        num_rows, vocab = logits.shape
        keys = torch.empty(num_rows, max(1, -(-vocab // TILE)), dtype=torch.int64)
        arguments = (logits, temperatures, seeds, positions, keys, num_rows, vocab, logits.stride(0), first)
        parts = self.launcher.parts(keys.numel(), 16 * num_rows * vocab)
        self.launcher.launch(kernel(draw, checked=checked), arguments, parts)
        return keys.amax(1)
