"""Attention over latents (DeepSeek V2 and V3, GLM-4.7-Flash)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime.base.model.latent_spec import LatentSpec
from runtime.kernels.attention.stored_kv import KVLayer
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.table import LatentKernels
from runtime.models.linear_maps import LinearMaps
from runtime.models.mixers.mixer import ForwardStep, LayerCache


@dataclass(frozen=True, slots=True)
class LatentMixer:
    """The weights of a layer."""

    spec: LatentSpec
    kernels: LatentKernels
    eps: float  # of the norm before the layer
    into: Linear  # to q, or to its latent | with `into_kv` None: the latent of keys and values, and the rotary key
    into_kv: Linear | None
    q_up: Linear | None  # from the latent of q; None if `into` makes q
    out: Linear
    up: Any  # kv_b, as `kernels.up` makes it
    q_norm: torch.Tensor | None  # [q_rank], with q_up
    kv_norm: torch.Tensor  # [rank]
    rope: int  # index of its rotary table

    @classmethod
    def build(cls, spec: LatentSpec, maps: LinearMaps, prefix: str, rope: int) -> LatentMixer:
        """The attention of the layer with this prefix."""
        norms = {name: maps.dense(prefix + name) for name in spec.parameters()}
        return cls(
            spec,
            maps.kernels.latent,
            maps.spec.norm_eps,
            into=maps.linear(prefix, "latent_in"),
            out=maps.linear(prefix, "out"),
            into_kv=maps.optional(prefix, "latent_kv"),
            q_up=maps.optional(prefix, "latent_q"),
            up=_from_latents(spec, maps, prefix),
            q_norm=norms.get("q_a_norm"),
            kv_norm=norms["kv_a_norm"],
            rope=rope,
        )

    def mix(self, h: torch.Tensor, norm: torch.Tensor | None, step: ForwardStep, cache: LayerCache) -> torch.Tensor:
        assert isinstance(cache, KVLayer)
        spec, (kv, _, group) = self.spec, cache
        kv_index, rows = step.batch.groups[group]
        q = self.into.normed(h, norm, self.eps)
        if self.into_kv is None:
            q, latents = q[:, : -spec.stored], q[:, -spec.stored :]
        else:
            latents = self.into_kv.normed(h, norm, self.eps)
        if self.q_up is not None:
            q = self.q_up.normed(q, self.q_norm, spec.norm_eps)
        heads = q.unflatten(1, (-1, spec.head_dim))
        self.kernels.store(
            heads, latents, step.ropes[self.rope], self.kv_norm, spec.norm_eps, kv, kv_index, spec.rope.interleaved
        )
        return self.kernels.attention(heads, kv, rows, self.up, scale=spec.score_scale)

    def with_linears(self, change: Callable[[Linear, str], Linear]) -> LatentMixer:
        into_kv = None if self.into_kv is None else change(self.into_kv, "latent_kv")
        q_up = None if self.q_up is None else change(self.q_up, "latent_q")
        return replace(
            self, into=change(self.into, "latent_in"), into_kv=into_kv, q_up=q_up, out=change(self.out, "out")
        )


def _from_latents(spec: LatentSpec, maps: LinearMaps, prefix: str) -> Any:
    """The map from latents to keys and values, as the backend has it."""
    kernels = maps.kernels.latent
    if spec.split_up:
        absorb, values = (maps.read(f"{prefix}{name}.weight").operand for name in ("k_b", "v_b"))
        return kernels.up_of_maps(absorb, values, spec.num_heads)
    return kernels.up(maps.dense(f"{prefix}kv_b.weight").view(spec.num_heads, spec.expanded, spec.rank), spec.nope_dim)
