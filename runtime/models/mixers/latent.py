"""Attention over latents (DeepSeek V2 and V3, GLM-4.7-Flash)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from runtime.base.model.latent_spec import LatentSpec
from runtime.kernels.attention.latent_torch import LatentForm
from runtime.kernels.attention.stored_kv import KVLayer
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.operations import LATENT_ATTENTION, LATENT_STORE, LATENT_UP, LATENT_UP_OF_MAPS
from runtime.models.linear_maps import LinearMaps
from runtime.models.mixers.mixer import ForwardStep, LayerCache, Mixer


@dataclass(frozen=True, slots=True)
class LatentMixer(Mixer):
    """The weights of a layer."""

    LINEARS = (("into", "latent_in"), ("out", "out"), ("into_kv", "latent_kv"), ("q_up", "latent_q"))

    spec: LatentSpec
    into: Linear  # makes q or its latent | with `into_kv` None: the latent for keys and values, and the rotary key
    into_kv: Linear | None
    q_up: Linear | None  # expands q's latent; None if `into` makes q
    up: Any  # kv_b, as LATENT_UP makes it
    q_norm: torch.Tensor | None  # [q_rank], with q_up
    form: LatentForm
    rope: int  # index of its rotary table

    @classmethod
    def build(cls, spec: LatentSpec, maps: LinearMaps, prefix: str, rope: int) -> LatentMixer:
        """The attention of the layer with this prefix."""
        norms = {name: maps.dense(prefix + name) for name in spec.parameters()}
        return cls(
            spec=spec,
            **cls.read(maps, prefix),
            up=_from_latents(spec, maps, prefix),
            q_norm=norms.get("q_a_norm"),
            form=LatentForm(norms["kv_a_norm"], spec.norm_eps, spec.rope.interleaved),
            rope=rope,
        )

    def store(
        self, h: torch.Tensor, norm: torch.Tensor | None, step: ForwardStep, cache: LayerCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(cache, KVLayer)
        spec, (kv, _, group) = self.spec, cache
        q = self.into.normed(h, norm, self.eps)
        if self.into_kv is None:
            q, latents = q[:, : -spec.stored], q[:, -spec.stored :]
        else:
            latents = self.into_kv.normed(h, norm, self.eps)
        if self.q_up is not None:
            q = self.q_up.normed(q, self.q_norm, spec.norm_eps)
        heads = q.unflatten(1, (-1, spec.head_dim))
        kv_index = step.batch.groups[group].kv_index
        self.kernels[LATENT_STORE](heads, latents, step.ropes[self.rope], kv, kv_index, self.form)
        return heads, latents

    def mix(self, h: torch.Tensor, norm: torch.Tensor | None, step: ForwardStep, cache: LayerCache) -> torch.Tensor:
        assert isinstance(cache, KVLayer)
        heads, _ = self.store(h, norm, step, cache)
        spec, rows = self.spec, step.batch.groups[cache.group].attention
        return self.kernels[LATENT_ATTENTION](heads, cache.values, rows, self.up, spec.score_scale, spec.first_key)


def _from_latents(spec: LatentSpec, maps: LinearMaps, prefix: str) -> Any:
    """The map from latents to keys and values, as the backend has it."""
    kernels = maps.kernels
    if spec.split_up:
        absorb, values = (maps.read(f"{prefix}{name}.weight").operand for name in ("k_b", "v_b"))
        return kernels[LATENT_UP_OF_MAPS](absorb, values, spec.num_heads)
    weight = maps.dense(f"{prefix}kv_b.weight").view(spec.num_heads, spec.expanded, spec.rank)
    return kernels[LATENT_UP](weight, spec.nope_dim)
