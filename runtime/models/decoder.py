"""Decoder: one forward pass, written with the operations of runtime.kernels. `decoder_build.py` assembles it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from runtime.kernels.attention.stored_kv import KVLayer
from runtime.kernels.collectives.communicator import Communicator
from runtime.kernels.collectives.heads_norm import HeadsNorm
from runtime.kernels.cpu.linear.interleaved_weight import InterleavedWeight
from runtime.kernels.experts.moe_torch import ExpertLayer
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.numerics import Numerics
from runtime.kernels.table import Kernels
from runtime.models.forward_batch import AttentionMetadata, ForwardBatch
from runtime.spec.decoder_spec import DecoderSpec


class Decoder:
    """A decoder-only transformer with pre-norm blocks and grouped-query attention, or one rank's share of it.

    Hidden states are whole on all ranks: `out` and `down` sum over ranks (`ReducedLinear`)."""

    def __init__(
        self,
        spec: DecoderSpec,
        numerics: Numerics,
        kernels: Kernels,
        communicator: Communicator,  # of the spec's rank
        weights: DecoderWeights,
    ) -> None:
        self.spec, self.numerics, self.kernels, self.communicator = spec, numerics, kernels, communicator
        self.embed, self.embed_tokens, self.position_embed = weights.embed, weights.embed_tokens, weights.positions
        self.embed_scale = float(torch.tensor(spec.embed_scale, dtype=numerics.dtype))
        self.ropes, self.query_scales = weights.ropes, weights.query_scales
        self.layers = weights.layers
        self.adapters: LayerAdapters | None = None  # None unless there is room for adapters
        self.final_norm, self.head_norm, self.head = weights.final_norm, weights.head_norm, weights.head

    def forward(self, batch: ForwardBatch, caches: list[KVLayer]) -> torch.Tensor:
        """[num_tokens, hidden] before the final norm. Writes the tokens' keys and values into the caches."""
        spec, kernels, eps = self.spec, self.kernels, self.spec.norm_eps
        heads = len(batch.token_ids), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim
        ropes = [kernels.rope_rows(table, batch.positions) for table in self.ropes]
        query_scales = None if self.query_scales is None else self.query_scales.index_select(0, batch.positions)
        h = self._embedded(batch)
        layers = self.layers
        if batch.adapters is not None:
            assert self.adapters is not None
            layers = self.adapters.adapted(layers, batch.adapters)
        for layer, (kv, scales) in zip(layers, caches, strict=True):
            qkv = layer.qkv.normed(h, layer.attn_norm, eps)
            if layer.heads_norm is not None:
                layer.heads_norm(qkv)
            norms = layer.q_norm, layer.k_norm
            q = kernels.rope_store_kv(qkv.view(heads), ropes[layer.rope], kv, batch.kv_index, *norms, eps, scales)
            if query_scales is not None:
                q.mul_(query_scales)
            layer.out.add_to(h, layer.attention(q, kv, batch.attention, scales), layer.post_attn_norm, eps)
            if isinstance(layer.feed_forward, Mlp):
                gate_up, down = layer.feed_forward
                gate_up.gated_into(down, h, layer.ffn_norm, eps, layer.post_ffn_norm)
            else:
                assert layer.ffn_norm is not None  # all families with experts have it
                layer.feed_forward.add_to(h, layer.ffn_norm, eps)
        return h

    def _embedded(self, batch: ForwardBatch) -> torch.Tensor:
        """[num_tokens, hidden] of the token embedding, with positions if they are learned."""
        h = self.embed_tokens(batch.token_ids, self.embed_scale)
        if self.position_embed is not None:
            h.add_(F.embedding(batch.positions, self.position_embed))
        return h

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] of `forward`, after the final norm."""
        return self.kernels.norm(hidden, self.final_norm, self.spec.norm_eps)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden] of `forward` -> [n, vocab], or the `spec.token_ids` of a rank. Writes them into `out`, float32,
        if given (Triton backend)."""
        logits, cap = self.head.logits(hidden, self.head_norm, self.spec.norm_eps, out), self.spec.logit_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


class Mlp(NamedTuple):
    """A feed-forward layer."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights, fused: q, k and v are one linear map, gate and up another."""

    attn_norm: torch.Tensor | None  # [hidden], or [2, hidden] for a layer norm with its bias; with spec.pre_norms
    post_attn_norm: torch.Tensor | None  # with spec.post_norms
    q_norm: torch.Tensor | None  # [head_dim], with spec.qk_norm of each head
    k_norm: torch.Tensor | None
    heads_norm: HeadsNorm | None  # with spec.qk_norm over all heads
    qkv: Linear
    rope: int  # index of its rotary table
    # (q, the layer's cache, the step's metadata, the cache's scales), with the layer's scale, window and soft cap
    attention: Callable[[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor | None], torch.Tensor]
    out: Linear
    ffn_norm: torch.Tensor | None
    post_ffn_norm: torch.Tensor | None
    feed_forward: Mlp | ExpertLayer


class DecoderWeights(NamedTuple):
    """The weights and tables of a decoder."""

    embed: torch.Tensor | InterleavedWeight  # [own tokens, hidden]
    embed_tokens: Callable[[torch.Tensor, float], torch.Tensor]  # token ids, a factor -> [num_tokens, hidden]
    positions: torch.Tensor | None  # [num_positions, hidden], with spec.learned_positions
    ropes: list[torch.Tensor]  # rotary tables
    query_scales: torch.Tensor | None  # [num_positions, ...] of q by position
    layers: list[Layer]
    final_norm: torch.Tensor
    head_norm: torch.Tensor  # the final norm with the logit scale
    head: Linear


class LayerAdapters(Protocol):
    """Adapters (LoRA) beside the maps of the layers."""

    def adapted(self, layers: Sequence[Layer], rows: torch.Tensor) -> list[Layer]:
        """The layers for a step. `rows` [num_tokens] has the adapter index of each token."""
