"""The operations of a decoder as compiled kernels of a CPU (`kernel_backend` llvm)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec
from runtime.kernels import operations as ops
from runtime.kernels.cpu.attention.compiled_attention import CompiledAttention
from runtime.kernels.cpu.attention.compiled_latents import CompiledLatents
from runtime.kernels.cpu.compiled_rows import CompiledRows
from runtime.kernels.cpu.experts.compiled_experts import CompiledExperts, compiled_layers
from runtime.kernels.cpu.linear.compiled_linear import Around
from runtime.kernels.cpu.linear.dense_linear import DenseLinear
from runtime.kernels.cpu.linear.interleaved_linear import InterleavedLinear
from runtime.kernels.cpu.linear.interleaved_weight import InterleavedWeight
from runtime.kernels.cpu.linear.lookup import dense_lookup, lookup
from runtime.kernels.cpu.linear.weight_form import ROWS
from runtime.kernels.cpu.sampling.draw import TILE, draw
from runtime.kernels.cpu.sampling.filters import top_k_top_p_bounds
from runtime.kernels.cpu.states.compiled_states import CompiledStates
from runtime.kernels.experts.moe_torch import ExpertLayer, Experts, Router
from runtime.kernels.linear.linear_torch import Activate, Linear, Norm, Operands, lookup_torch
from runtime.kernels.llvm.launcher import Launcher, kernel
from runtime.kernels.numerics import Numerics
from runtime.kernels.operation import Operation
from runtime.kernels.sampling.token_keys import NONE
from runtime.kernels.sampling.top_k_top_p import Filters


class CompiledOperations:
    """Operations that share a launcher. `norm`, `activate` and `linear` are references."""

    def __init__(
        self,
        numerics: Numerics,
        spec: DecoderSpec,
        norm: Norm,
        activate: Activate,
        linear: Callable[[Sequence[torch.Tensor], torch.Tensor | None], Linear],
    ) -> None:
        self.launcher = Launcher()
        self._numerics, self._linear = numerics, linear
        self.rows = CompiledRows(self.launcher, norm, activate, spec.ffn.activation, spec.ffn.gated)
        self._around = Around(self.launcher, norm, self.rows.activate, spec.ffn.activation, spec.ffn.gated)
        # These take float32 rows; steps then make `TiledRows`.
        is_float32 = numerics.dtype == torch.float32 and (spec.latent is None or spec.latent.has_whole_blocks(ROWS))
        self.attention = CompiledAttention(self.launcher) if is_float32 else None
        self.latents = None
        if spec.latent is not None and self.attention is not None:
            self.latents = CompiledLatents(self.launcher, self.attention, numerics.activation_bits // 8)

    def implementations(self) -> dict[Operation[..., Any], Callable[..., Any]]:
        """Compiled kernels by operation. Except for the lookup, they take float32 rows."""
        rows, found = self.rows, dict[Operation[..., Any], Callable[..., Any]]({ops.LOOKUP: self.lookup})
        if self.attention is not None:
            found |= {
                ops.RMS_NORM: rows.norm, ops.NORM_IN_PLACE: rows.norm_in_place, ops.GATED_ACTIVATION: rows.activate,
                ops.SOFT_CAP: rows.soft_cap, ops.MULTIPLY: rows.multiply, ops.ZEROS_LIKE: rows.zeros_like,
                ops.ROPE_ROWS: ops.ROPE_ROWS.triton,  # the compiled kernel, too, reads its rows of the table
                ops.ROPE_STORE_KV: self.attention.rope_store_kv, ops.ATTENTION: self.attention.attention,
                ops.GATE_OUTPUT: self.attention.gate_output,
            }  # fmt: skip
            found |= CompiledStates(self.launcher).implementations()
        if (latents := self.latents) is not None:
            found |= {
                ops.LATENT_UP: latents.up, ops.LATENT_UP_OF_MAPS: latents.up_of_maps, ops.LATENT_STORE: latents.store,
                ops.LATENT_ATTENTION: latents.attention,
            }  # fmt: skip
        return found

    def linear(self, weights: Sequence[torch.Tensor | InterleavedWeight], bias: torch.Tensor | None) -> Linear:
        """A layer with one dense weight, or with interleaved ones. Kernels multiply dense weights in float32."""
        interleaved = [weight for weight in weights if isinstance(weight, InterleavedWeight)]
        if interleaved:
            return InterleavedLinear(interleaved, bias, self._around, self._numerics.activation_bits // 8)
        (weight,) = (weight for weight in weights if isinstance(weight, torch.Tensor))
        if self.attention is None:
            return self._linear([weight], bias)
        return DenseLinear(weight, bias, self._around)

    def experts(self, spec: ExpertsSpec, router: Router, experts: Iterable[tuple[Operands, Operands]]) -> ExpertLayer:
        """The mixture with the gate_up and down of each expert."""
        layers = [(self.linear(*gate_up), self.linear(*down)) for gate_up, down in experts]
        if (compiled := compiled_layers(layers)) is not None:
            return CompiledExperts(spec, router, compiled)
        products = [(gate_up.product, down.product) for gate_up, down in layers]
        return Experts(spec, router, products, lambda product: product, self._around.activate)

    def lookup(self, table: torch.Tensor | InterleavedWeight, ids: torch.Tensor, factor: float) -> torch.Tensor:
        """Table rows, times a factor; valid until the next lookup of as many columns."""
        if isinstance(table, torch.Tensor) and self.attention is None:
            return lookup_torch(table, ids, factor)
        num_rows, columns = len(ids), table.shape[1]
        out = self.launcher.buffer(f"rows {columns}", num_rows, columns)
        rows = ids, out, num_rows, columns, factor
        if isinstance(table, InterleavedWeight):
            parts = self.launcher.parts(num_rows, 16 * out.numel())
            self.launcher.launch(kernel(lookup, form=table.form), (*table.tensors, *rows), parts)
        else:
            self.launcher.launch(kernel(dense_lookup), (table, *rows), self.launcher.parts(num_rows, out.numel()))
        return out.to(self._numerics.dtype)

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
        if not vocab:  # a rank without tokens
            return torch.full((num_rows,), NONE)
        keys = torch.empty(num_rows, -(-vocab // TILE), dtype=torch.int64)
        arguments = (logits, temperatures, seeds, positions, keys, num_rows, vocab, logits.stride(0), first)
        parts = self.launcher.parts(keys.numel(), 16 * num_rows * vocab)
        self.launcher.launch(kernel(draw, checked=checked), arguments, parts)
        return keys.amax(1)

    def filter_bounds(self, logits: torch.Tensor, filters: Filters) -> torch.Tensor:
        """`top_k_top_p_bounds_torch` without a sort of the vocabulary."""
        return top_k_top_p_bounds(self.launcher, logits, filters)
