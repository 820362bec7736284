"""The gated delta rule in place of attention (Qwen3.5, Qwen3-Next)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.base.model.mixer_spec import DeltaRuleSpec
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.states.operations import CAUSAL_CONV, DELTA_RULE
from runtime.kernels.step.state_rows import DeltaForm, DeltaState
from runtime.models.linear_maps import LinearMaps
from runtime.models.mixers.mixer import ForwardStep, LayerCache, Mixer


@dataclass(frozen=True, slots=True)
class DeltaRuleMixer(Mixer):
    """The weights of a layer."""

    LINEARS = (("into", "mix_in"), ("gates", "mix_gates"), ("out", "mix_out"))

    spec: DeltaRuleSpec
    into: Linear  # makes q, k, v | z, the output gate | with `gates` None: logits for rate and decay
    gates: Linear | None  # makes the logits for rate and decay
    conv: torch.Tensor  # [q, k and v channels, width]
    form: DeltaForm

    @classmethod
    def build(cls, spec: DeltaRuleSpec, maps: LinearMaps, prefix: str) -> DeltaRuleMixer:
        """The mixer of the layer with this prefix."""
        own = {name: maps.dense(prefix + name) for name in spec.parameters()}
        decay, bias = own["decay_log"].float(), own["decay_bias"].float()
        return cls(
            spec=spec,
            **cls.read(maps, prefix),
            conv=own["conv"].squeeze(1),
            form=DeltaForm(decay, bias, own["mix_norm"], maps.spec.norm_eps, spec.tiled),
        )

    def mix(self, h: torch.Tensor, norm: torch.Tensor | None, step: ForwardStep, cache: LayerCache) -> torch.Tensor:
        assert isinstance(cache, DeltaState)
        rows, (channels, _) = step.batch.states, self.conv.shape
        assert rows is not None
        x = self.into.normed(h, norm, self.eps)
        z, end = x[:, channels : channels + self.spec.values], channels + self.spec.values
        gates = x[:, end:] if self.gates is None else self.gates.normed(h, norm, self.eps)
        qkv = self.kernels[CAUSAL_CONV](x[:, :channels], self.conv, None, rows, cache)
        return self.kernels[DELTA_RULE](qkv, z, gates, self.form, rows, cache)
