"""Attention with grouped queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.base.model.attention_spec import AttentionSpec
from runtime.kernels.attention.paged_attention import AttentionForm
from runtime.kernels.attention.rope import HeadForm, Heads
from runtime.kernels.attention.stored_kv import KVLayer
from runtime.kernels.collectives.heads_norm import HeadsNorm
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.operations import ATTENTION, GATE_OUTPUT, ROPE_STORE_KV
from runtime.models.linear_maps import LinearMaps
from runtime.models.mixers.mixer import ForwardStep, LayerCache, Mixer


@dataclass(frozen=True, slots=True)
class AttentionMixer(Mixer):
    """The weights of a layer. q, k and v are one linear map, with the output's gate before them."""

    LINEARS = (("qkv", "qkv"), ("out", "out"))

    spec: AttentionSpec
    qkv: Linear
    gate_width: int  # the gate's columns in `qkv`; 0 without a gate
    heads_norm: HeadsNorm | None  # None without spec.qk_norm over all heads
    heads: HeadForm  # the heads of `qkv`, and with spec.qk_norm of each head their norms
    rope: int  # index of its rotary table
    form: AttentionForm

    @classmethod
    def build(cls, spec: AttentionSpec, maps: LinearMaps, prefix: str, rope: int, num_positions: int) -> AttentionMixer:
        """The attention of the layer with this prefix."""
        heads: Heads = "q" if spec.kv_source is not None else "qk" if spec.keys_as_values else "qkv"
        q_norm = k_norm = None
        if spec.qk_norm == "head":
            q_norm = maps.turned(f"{prefix}q_norm")
            k_norm = q_norm if heads == "q" else maps.turned(f"{prefix}k_norm")
        return cls(
            spec=spec,
            **cls.read(maps, prefix),
            gate_width=spec.num_heads * spec.head_dim if spec.output_gate else 0,
            heads_norm=maps.heads_norm(prefix) if spec.qk_norm == "all" else None,
            heads=HeadForm(heads, q_norm, k_norm, maps.spec.norm_eps, spec.v_norm),
            rope=rope,
            form=AttentionForm(
                scale=spec.score_scale,
                window=spec.window if spec.window < num_positions else 0,
                soft_cap=spec.soft_cap,
                sinks=maps.dense(f"{prefix}sinks").float() if spec.sinks else None,
                whole_images=spec.whole_images,
                first_key=spec.first_key,
            ),
        )

    def store(
        self, h: torch.Tensor, norm: torch.Tensor | None, step: ForwardStep, cache: LayerCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert isinstance(cache, KVLayer)
        kv, scales, group = cache
        gate_and_qkv = self.qkv.normed(h, norm, self.eps)
        qkv = gate_and_qkv[:, self.gate_width :]
        if self.heads_norm is not None:
            self.heads_norm(qkv)
        by_head = qkv.unflatten(1, (-1, self.spec.head_dim))
        kv_index = step.batch.groups[group].kv_index
        q = self.kernels[ROPE_STORE_KV](by_head, step.ropes[self.rope], kv, kv_index, self.heads, scales)
        return q, gate_and_qkv

    def mix(self, h: torch.Tensor, norm: torch.Tensor | None, step: ForwardStep, cache: LayerCache) -> torch.Tensor:
        assert isinstance(cache, KVLayer)
        q, gate_and_qkv = self.store(h, norm, step, cache)
        kernels, (kv, scales, group) = self.kernels, cache
        if step.query_scales is not None:
            q.mul_(step.query_scales)
        mixed = kernels[ATTENTION](q, kv, step.batch.groups[group].attention, self.form, scales)
        if self.gate_width:
            kernels[GATE_OUTPUT](mixed, gate_and_qkv[:, : self.gate_width])
        return mixed
