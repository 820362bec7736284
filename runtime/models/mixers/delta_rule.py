"""The gated delta rule in place of attention (Qwen3.5, Qwen3-Next)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from runtime.base.model.mixer_spec import DeltaRuleSpec
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.states.state_rows import DeltaState
from runtime.kernels.table import Kernels
from runtime.models.linear_maps import LinearMaps
from runtime.models.mixers.mixer import ForwardStep, LayerCache


@dataclass(frozen=True, slots=True)
class DeltaRuleMixer:
    """The weights of a layer."""

    spec: DeltaRuleSpec
    kernels: Kernels
    eps: float  # of the norm
    into: Linear  # to q, k, v | z, the gate of the output | with `gates` None: logits of rate and decay
    gates: Linear | None  # to the logits of rate and decay
    out: Linear
    conv: torch.Tensor  # [channels of q, k and v, width]
    decay_log: torch.Tensor  # [value_heads] float32
    decay_bias: torch.Tensor  # [value_heads] float32
    mix_norm: torch.Tensor  # [value_dim]

    @classmethod
    def build(cls, spec: DeltaRuleSpec, maps: LinearMaps, prefix: str) -> DeltaRuleMixer:
        """The mixer of the layer with this prefix."""
        own = {name: maps.dense(prefix + name) for name in spec.parameters()}
        return cls(
            spec,
            maps.kernels,
            maps.spec.norm_eps,
            into=maps.linear(prefix, "mix_in"),
            gates=maps.optional(prefix, "mix_gates"),
            out=maps.linear(prefix, "mix_out"),
            conv=own["conv"].squeeze(1),
            decay_log=own["decay_log"].float(),
            decay_bias=own["decay_bias"].float(),
            mix_norm=own["mix_norm"],
        )

    def mix(self, h: torch.Tensor, norm: torch.Tensor | None, step: ForwardStep, cache: LayerCache) -> torch.Tensor:
        assert isinstance(cache, DeltaState)
        rows, (channels, _) = step.batch.states, self.conv.shape
        assert rows is not None
        x = self.into.normed(h, norm, self.eps)
        z, end = x[:, channels : channels + self.spec.values], channels + self.spec.values
        gates = x[:, end:] if self.gates is None else self.gates.normed(h, norm, self.eps)
        qkv = self.kernels.causal_conv(x[:, :channels], self.conv, None, rows, cache)
        weights = self.decay_log, self.decay_bias, self.mix_norm
        return self.kernels.delta_rule(qkv, z, gates, *weights, self.eps, rows, cache, self.spec.tiled)

    def with_linears(self, change: Callable[[Linear, str], Linear]) -> DeltaRuleMixer:
        gates = None if self.gates is None else change(self.gates, "mix_gates")
        return replace(self, into=change(self.into, "mix_in"), gates=gates, out=change(self.out, "mix_out"))
