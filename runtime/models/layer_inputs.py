"""Per-layer embeddings (Gemma 4): each layer has its own token embedding, and adds a part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from runtime.kernels.linear.linear_torch import Linear, Norm


@dataclass(frozen=True, slots=True)
class LayerEmbedding:
    """All layers' inputs: the mean of a token embedding and a projection of the first hidden states.

    Factors are in the weights: each summand has the factor 0.5 ** 0.5, and the embedding also width ** 0.5."""

    lookup: Callable[[torch.Tensor, float], torch.Tensor]  # token ids, a factor -> [num_tokens, num_layers * width]
    map: Linear  # projects the hidden states
    map_norm: torch.Tensor  # [width] float32, norms each layer's part of the map
    width: int
    norm: Norm
    eps: float

    def inputs(self, token_ids: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_layers, width]."""
        mapped = self.map.normed(h, None, self.eps).reshape(-1, self.width)
        embedded = self.lookup(token_ids, (0.5 * self.width) ** 0.5)
        self.norm(mapped, self.map_norm, self.eps, embedded.view(-1, self.width))
        return embedded.view(len(h), -1, self.width)


@dataclass(frozen=True, slots=True)
class LayerInput:
    """A layer's use of its input."""

    layer: int
    gate: Linear
    out: Linear
    post_norm: torch.Tensor  # [hidden]
    gate_by: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # activation(gate) * input

    def add_to(self, h: torch.Tensor, inputs: torch.Tensor, eps: float) -> None:
        """h += norm(out(activation(gate(h)) * input))."""
        gated = self.gate_by(self.gate.normed(h, None, eps), inputs[:, self.layer])
        self.out.add_to(h, gated, self.post_norm, eps)

    def with_linears(self, change: Callable[[Linear, str], Linear]) -> LayerInput:
        """This part with other maps: `change` gets each one with its fused name."""
        return replace(self, gate=change(self.gate, "layer_gate"), out=change(self.out, "layer_out"))
