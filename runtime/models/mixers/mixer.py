"""Mixer: the part of a layer in which a token meets the tokens before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

import torch

from runtime.kernels.attention.stored_kv import KVLayer
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.states.state_rows import ConvState, DeltaState
from runtime.models.forward_batch import ForwardBatch

LayerCache = KVLayer | ConvState | DeltaState


class ForwardStep(NamedTuple):
    """What all layers of a forward pass read."""

    batch: ForwardBatch
    ropes: Sequence[tuple[torch.Tensor, torch.Tensor]]  # rows of each rotary table, for `rope_store_kv`
    query_scales: torch.Tensor | None  # [num_tokens, 1, 1] factors of q
    layer_inputs: torch.Tensor | None  # [num_tokens, num_layers, width], with spec.layer_embed_size


class Mixer(Protocol):
    """Attention, or an operation in its place."""

    @property
    def out(self) -> Linear:
        """The map of the results, which the caller adds to the hidden states."""

    def mix(self, h: torch.Tensor, norm: torch.Tensor | None, step: ForwardStep, cache: LayerCache) -> torch.Tensor:
        """[num_tokens, inputs of `out`] of hidden states, with the norm before the layer. The step's tokens enter the
        layer's cache."""

    def with_linears(self, change: Callable[[Linear, str], Linear]) -> Self:
        """This mixer with other maps: `change` gets each one with its fused name."""
