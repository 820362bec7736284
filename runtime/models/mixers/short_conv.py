"""A gated short convolution in place of attention (LFM2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.base.model.mixer_spec import ShortConvSpec
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.states.operations import SHORT_CONV
from runtime.kernels.step.state_rows import ConvState
from runtime.models.linear_maps import LinearMaps
from runtime.models.mixers.mixer import ForwardStep, LayerCache, Mixer


@dataclass(frozen=True, slots=True)
class ShortConvMixer(Mixer):
    """The weights of a layer."""

    LINEARS = (("into", "mix_in"), ("out", "mix_out"))

    into: Linear  # makes the input gate, the output gate, and x
    conv: torch.Tensor  # [channels, width]
    conv_bias: torch.Tensor | None  # [channels]

    @classmethod
    def build(cls, spec: ShortConvSpec, maps: LinearMaps, prefix: str) -> ShortConvMixer:
        """The mixer of the layer with this prefix."""
        own = {name: maps.dense(prefix + name) for name in spec.parameters()}
        return cls(conv=own["conv"].squeeze(1), conv_bias=own.get("conv_bias"), **cls.read(maps, prefix))

    def mix(self, h: torch.Tensor, norm: torch.Tensor | None, step: ForwardStep, cache: LayerCache) -> torch.Tensor:
        assert isinstance(cache, ConvState)
        rows = step.batch.states
        assert rows is not None
        return self.kernels[SHORT_CONV](self.into.normed(h, norm, self.eps), self.conv, self.conv_bias, rows, cache)
