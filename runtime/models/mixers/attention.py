"""Attention with grouped queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from runtime.base.model.attention_spec import AttentionSpec
from runtime.kernels.attention.rope import Heads
from runtime.kernels.attention.stored_kv import KVLayer
from runtime.kernels.collectives.heads_norm import HeadsNorm
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.table import Kernels
from runtime.models.forward_batch import AttentionMetadata
from runtime.models.linear_maps import LinearMaps
from runtime.models.mixers.mixer import ForwardStep, LayerCache


@dataclass(frozen=True, slots=True)
class AttentionMixer:
    """The weights of a layer. q, k and v are one linear map, with the output's gate before them."""

    spec: AttentionSpec
    kernels: Kernels
    eps: float  # of the norms
    qkv: Linear
    out: Linear
    gate_width: int  # the gate's columns in `qkv`; 0 without a gate
    q_norm: torch.Tensor | None  # [head_dim], with spec.qk_norm of each head
    k_norm: torch.Tensor | None
    heads_norm: HeadsNorm | None  # with spec.qk_norm over all heads
    heads: Heads  # of `qkv`
    rope: int  # index of its rotary table
    # (q, the layer's cache, the step's metadata, the cache's scales), with the layer's scale, window, soft cap
    # and sinks
    attention: Callable[[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor | None], torch.Tensor]

    @classmethod
    def build(cls, spec: AttentionSpec, maps: LinearMaps, prefix: str, rope: int, num_positions: int) -> AttentionMixer:
        """The attention of the layer with this prefix."""
        heads: Heads = "q" if spec.kv_source is not None else "qk" if spec.keys_as_values else "qkv"
        q_norm = k_norm = None
        if spec.qk_norm == "head":
            q_norm = maps.turned(f"{prefix}q_norm")
            k_norm = q_norm if heads == "q" else maps.turned(f"{prefix}k_norm")
        qkv, out = (maps.linear(prefix, name) for name in ("qkv", "out"))
        return cls(
            spec,
            maps.kernels,
            maps.spec.norm_eps,
            qkv,
            out,
            gate_width=spec.num_heads * spec.head_dim if spec.output_gate else 0,
            q_norm=q_norm,
            k_norm=k_norm,
            heads_norm=maps.heads_norm(prefix) if spec.qk_norm == "all" else None,
            heads=heads,
            rope=rope,
            attention=partial(
                maps.kernels.attention,
                scale=spec.score_scale,
                window=spec.window if spec.window < num_positions else 0,
                soft_cap=spec.soft_cap,
                sinks=maps.dense(f"{prefix}sinks").float() if spec.sinks else None,
            ),
        )

    def mix(self, h: torch.Tensor, norm: torch.Tensor | None, step: ForwardStep, cache: LayerCache) -> torch.Tensor:
        assert isinstance(cache, KVLayer)
        kernels, (kv, scales, group) = self.kernels, cache
        kv_index, rows = step.batch.groups[group]
        gate_and_qkv = self.qkv.normed(h, norm, self.eps)
        qkv = gate_and_qkv[:, self.gate_width :]
        if self.heads_norm is not None:
            self.heads_norm(qkv)
        of_heads, norms = qkv.unflatten(1, (-1, self.spec.head_dim)), (self.q_norm, self.k_norm)
        q = kernels.rope_store_kv(
            of_heads, step.ropes[self.rope], kv, kv_index, *norms, self.eps, scales, self.heads, self.spec.v_norm
        )
        if step.query_scales is not None:
            q.mul_(step.query_scales)
        mixed = self.attention(q, kv, rows, scales)
        if self.gate_width:
            kernels.gate_output(mixed, gate_and_qkv[:, : self.gate_width])
        return mixed

    def with_linears(self, change: Callable[[Linear, str], Linear]) -> AttentionMixer:
        return replace(self, qkv=change(self.qkv, "qkv"), out=change(self.out, "out"))
