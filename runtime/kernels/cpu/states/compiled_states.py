"""The operations in layers with a state, as calls to compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from runtime.kernels.cpu.states.convolution import convolution
from runtime.kernels.cpu.states.delta_rule import delta_inputs, delta_rule
from runtime.kernels.llvm.launcher import Launcher, kernel
from runtime.kernels.operation import Operation
from runtime.kernels.states.operations import CAUSAL_CONV, DELTA_RULE, SHORT_CONV
from runtime.kernels.step.state_rows import ConvState, DeltaForm, DeltaState, StateRows


class CompiledStates:
    """For float32 rows. Each result is valid until the next call of the same operation."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher

    def implementations(self) -> dict[Operation[..., Any], Callable[..., Any]]:
        """Compiled kernels by operation."""
        return {CAUSAL_CONV: self.causal_conv, SHORT_CONV: self.short_conv, DELTA_RULE: self.delta_rule}

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: StateRows,
        state: ConvState | DeltaState,
    ) -> torch.Tensor:
        """`causal_conv_torch` as one kernel."""
        return self._convolution(x, weight, bias, rows, state, gated=False)

    def short_conv(
        self,
        gates_and_x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: StateRows,
        state: ConvState,
    ) -> torch.Tensor:
        """`short_conv_torch` as one kernel."""
        return self._convolution(gates_and_x, weight, bias, rows, state, gated=True)

    def _convolution(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: StateRows,
        state: ConvState | DeltaState,
        gated: bool,
    ) -> torch.Tensor:
        num_tokens, (channels, width) = len(x), weight.shape
        out = self.launcher.buffer("convolution", num_tokens, channels)
        function = kernel(convolution, width=width, has_bias=bias is not None, gated=gated)
        sizes = len(rows.slots), channels, x.stride(0), state.inputs.stride(0), rows.places.stride(0)
        arguments = (x, weight, bias, state.inputs, *_tensors(rows), out, *sizes)
        parts = self.launcher.parts(-(-channels // 16), 4 * width * out.numel())
        self.launcher.launch(function, arguments, parts)
        return out

    def delta_rule(
        self,
        qkv: torch.Tensor,
        z: torch.Tensor,
        gates: torch.Tensor,
        form: DeltaForm,
        rows: StateRows,
        state: DeltaState,
    ) -> torch.Tensor:
        """`delta_rule_torch` as two kernels."""
        decay_log, decay_bias, norm_weight, eps, tiled = form
        launcher, num_tokens, (_, value_heads, key_dim, value_dim) = self.launcher, len(qkv), state.state.shape
        key_heads = (qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
        group = value_heads // key_heads
        queries, keys = (
            launcher.buffer(f"delta {name}", num_tokens, key_heads * key_dim) for name in ("queries", "keys")
        )
        products = launcher.buffer("delta products", num_tokens, key_heads)
        rates, decays = (launcher.buffer(f"delta {name}", num_tokens, value_heads) for name in ("rates", "decays"))
        made = queries, keys, products, rates, decays
        sizes = num_tokens, key_heads, group, qkv.stride(0), gates.stride(0)
        launcher.launch(
            kernel(delta_inputs, key_dim=key_dim),
            (qkv, gates, decay_log, decay_bias, *made, *sizes),
            launcher.parts(num_tokens * key_heads, 8 * (queries.numel() + 16 * rates.numel())),
        )
        out, num_rows = launcher.buffer("delta", num_tokens, value_heads * value_dim), len(rows.slots)
        rings = state.keys, state.values, state.decays
        strides = (
            qkv.stride(0), z.stride(0), rows.places.stride(0), state.state.stride(0), state.positions.stride(0),
            *(ring.stride(i) for ring in rings for i in range(2)),
        )  # fmt: skip
        launcher.launch(
            kernel(delta_rule, key_dim=key_dim, value_dim=value_dim),
            (
                qkv, *made, z, norm_weight, *_tensors(rows), state.state, state.positions, *rings, out, num_rows,
                key_heads, value_heads, 1 if tiled else group, *strides, int(rows.steps_only), eps,
            ),
            launcher.parts(num_rows * value_heads, 4 * out.numel() * key_dim),
        )  # fmt: skip
        return out


def _tensors(rows: StateRows) -> tuple[torch.Tensor, ...]:
    return rows.slots, rows.starts, rows.q_starts, rows.places
