"""A gated short convolution in place of attention (LFM2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from runtime.base.model.mixer_spec import ShortConvSpec
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.states.state_rows import ConvState
from runtime.kernels.table import Kernels
from runtime.models.linear_maps import LinearMaps
from runtime.models.mixers.mixer import ForwardStep, LayerCache


@dataclass(frozen=True, slots=True)
class ShortConvMixer:
    """The weights of a layer."""

    kernels: Kernels
    eps: float  # of the norm before the layer
    into: Linear  # to the gate of the input, the gate of the output, and x
    out: Linear
    conv: torch.Tensor  # [channels, width]
    conv_bias: torch.Tensor | None  # [channels]

    @classmethod
    def build(cls, spec: ShortConvSpec, maps: LinearMaps, prefix: str) -> ShortConvMixer:
        """The mixer of the layer with this prefix."""
        own = {name: maps.dense(prefix + name) for name in spec.parameters()}
        into, out = (maps.linear(prefix, name) for name in ("mix_in", "mix_out"))
        return cls(maps.kernels, maps.spec.norm_eps, into, out, own["conv"].squeeze(1), own.get("conv_bias"))

    def mix(self, h: torch.Tensor, norm: torch.Tensor | None, step: ForwardStep, cache: LayerCache) -> torch.Tensor:
        assert isinstance(cache, ConvState)
        rows = step.batch.states
        assert rows is not None
        return self.kernels.short_conv(self.into.normed(h, norm, self.eps), self.conv, self.conv_bias, rows, cache)

    def with_linears(self, change: Callable[[Linear, str], Linear]) -> ShortConvMixer:
        return replace(self, into=change(self.into, "mix_in"), out=change(self.out, "mix_out"))
