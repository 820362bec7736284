"""Mixer: the part of a layer in which a token meets the tokens before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch

from runtime.kernels.attention.stored_kv import KVLayer
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.step.state_rows import ConvState, DeltaState
from runtime.kernels.table import Kernels
from runtime.models.forward_batch import ForwardBatch
from runtime.models.linear_maps import LinearMaps

LayerCache = KVLayer | ConvState | DeltaState


class ForwardStep(NamedTuple):
    """What all layers of a forward pass read."""

    batch: ForwardBatch
    ropes: Sequence[tuple[torch.Tensor, torch.Tensor]]  # each rotary table's rows, for `rope_store_kv`
    query_scales: torch.Tensor | None  # [num_tokens, 1, 1] q's factors
    layer_inputs: torch.Tensor | None  # [num_tokens, num_layers, width], with spec.layer_embed_size


@dataclass(frozen=True, slots=True)
class Mixer:
    """The weights of attention, or of an operation in its place."""

    LINEARS: ClassVar[tuple[tuple[str, str], ...]]  # (field, fused name) of each map, in the order of reading

    kernels: Kernels
    eps: float  # epsilon of the norm before the layer
    out: Linear  # the map of the results, which the caller adds to the hidden states

    @classmethod
    def read(cls, maps: LinearMaps, prefix: str) -> dict[str, Any]:
        """The fields that all mixers have, and the maps of the layer with this prefix."""
        linears = {field: maps.optional(prefix, name) for field, name in cls.LINEARS}
        return {"kernels": maps.kernels, "eps": maps.spec.norm_eps, **linears}

    def mix(self, h: torch.Tensor, norm: torch.Tensor | None, step: ForwardStep, cache: LayerCache) -> torch.Tensor:
        """Return [num_tokens, inputs of `out`] from hidden states, with the norm before the layer. The step's tokens
        enter the layer's cache."""
        raise NotImplementedError

    def store(
        self, h: torch.Tensor, norm: torch.Tensor | None, step: ForwardStep, cache: LayerCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first part of attention's `mix`: the step's keys and values enter the cache.

        Returns q by head, and the [num_tokens, ...] that keys and values were made from."""
        raise NotImplementedError

    def with_linears(self, change: Callable[[Linear, str], Linear]) -> Self:
        """This mixer with other maps: `change` gets each one with its fused name."""
        maps = [(field, getattr(self, field), name) for field, name in self.LINEARS]
        changed: dict[str, Any] = {field: change(linear, name) for field, linear, name in maps if linear is not None}
        return replace(self, **changed)
