"""A gated short convolution in place of attention (LFM2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.states.state_rows import ConvState
from runtime.kernels.table import Kernels
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

    def mix(self, h: torch.Tensor, norm: torch.Tensor | None, step: ForwardStep, cache: LayerCache) -> torch.Tensor:
        assert isinstance(cache, ConvState)
        rows = step.batch.states
        assert rows is not None
        return self.kernels.short_conv(self.into.normed(h, norm, self.eps), self.conv, self.conv_bias, rows, cache)

    def with_linears(self, change: Callable[[Linear, str], Linear]) -> ShortConvMixer:
        return replace(self, into=change(self.into, "mix_in"), out=change(self.out, "mix_out"))
