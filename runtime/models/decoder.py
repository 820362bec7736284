"""The decoder: one forward pass, assembled from a spec and written with the operations of runtime.kernels."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.core.decoder_spec import DecoderSpec, ExpertsSpec
from runtime.kernels import select
from runtime.kernels.experts import ExpertLayer
from runtime.kernels.linear import Linear
from runtime.kernels.numerics import Numerics
from runtime.kernels.rope import rope_table
from runtime.kernels.stored_kv import KVLayer
from runtime.models.forward_batch import AttentionMetadata, ForwardBatch
from runtime.models.weight_map import WeightMap
from runtime.models.weights import ReadWeight, draw, read_from
from runtime.quant.dense import DENSE
from runtime.quant.format import TensorSource, Weight, WeightFormat
from runtime.quant.formats import weight_bytes, weight_formats

logger = logging.getLogger(__name__)


class Mlp(NamedTuple):
    """A feed-forward layer."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights, fused: q, k and v are one linear map, gate and up another."""

    attn_norm: torch.Tensor  # [hidden]; a layer norm's with its bias, [2, hidden]
    post_attn_norm: torch.Tensor | None  # with spec.post_norms
    q_norm: torch.Tensor | None  # [head_dim], with spec.qk_norm
    k_norm: torch.Tensor | None
    qkv: Linear
    rope: int  # index of its rotary table
    # Of q, the layer's cache, the step's metadata and the cache's scales, with the layer's scale, window and soft cap.
    attention: Callable[[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor | None], torch.Tensor]
    out: Linear
    ffn_norm: torch.Tensor
    post_ffn_norm: torch.Tensor | None
    feed_forward: Mlp | ExpertLayer


class Decoder:
    """A decoder-only transformer with pre-norm blocks and grouped-query attention, as its spec says."""

    def __init__(
        self,
        spec: DecoderSpec,
        numerics: Numerics,
        num_positions: int,  # the most positions of a request
        read: ReadWeight,
    ) -> None:
        self.spec, self.numerics, self.num_positions = spec, numerics, num_positions
        self.kernels = select(numerics, spec)
        self.format_of = weight_formats(spec, numerics)
        table = partial(rope_table, head_dim=spec.head_dim, num_positions=num_positions, dtype=numerics.dtype)
        ropes = (spec.rope,) if spec.local_rope is None else (spec.rope, spec.local_rope)
        self.ropes = [table(rope).to(numerics.device) for rope in ropes]
        (self.embed,) = read("embed")
        self.embed_scale = float(torch.tensor(spec.embed_scale, dtype=numerics.dtype))
        self.position_embed = read("positions")[0] if spec.learned_positions else None
        self.layers = [self._layer(i, read) for i in range(spec.num_layers)]
        self.final_norm = self._norm("final_norm", read)
        head = self.format_of("head")
        self.head = head.linear(head.encode(self.embed) if spec.tied_head else read("head"), None, self.kernels)

    def _layer(self, index: int, read: ReadWeight) -> Layer:
        spec, prefix = self.spec, f"layers.{index}."
        sliding = bool(spec.sliding) and spec.sliding[index]
        attn_norm, ffn_norm = (self._norm(prefix + n, read) for n in ("attn_norm", "ffn_norm"))
        post_attn_norm = self._norm(prefix + "post_attn_norm", read) if spec.post_norms else None
        post_ffn_norm = self._norm(prefix + "post_ffn_norm", read) if spec.post_norms else None
        q_norm, k_norm = (
            read(prefix + n)[0][rope_permutation(spec)] if spec.qk_norm else None for n in ("q_norm", "k_norm")
        )
        qkv, out = (self._linear(prefix, name, read) for name in ("qkv", "out"))
        feed_forward: Mlp | ExpertLayer
        if spec.experts is None:
            feed_forward = Mlp(self._linear(prefix, "gate_up", read), self._linear(prefix, "down", read))
        else:
            feed_forward = self._experts(prefix, spec.experts, read)
        attention = partial(
            self.kernels.attention,
            scale=spec.head_dim**-0.5 if spec.attn_scale is None else spec.attn_scale,
            window=spec.window if sliding and spec.window < self.num_positions else 0,
            soft_cap=spec.attn_soft_cap,
        )
        return Layer(
            attn_norm=attn_norm,
            post_attn_norm=post_attn_norm,
            q_norm=q_norm,
            k_norm=k_norm,
            qkv=qkv,
            rope=int(sliding and spec.local_rope is not None),
            attention=attention,
            out=out,
            ffn_norm=ffn_norm,
            post_ffn_norm=post_ffn_norm,
            feed_forward=feed_forward,
        )

    def _linear(self, prefix: str, name: str, read: ReadWeight) -> Linear:
        """A fused linear map."""
        parts, has_bias = self.spec.linears()[name]
        weight_format, weight = self._weight(prefix, name, read)
        bias = DENSE.join([read(f"{prefix}{p}.bias") for p in parts], self._row_order(name))[0] if has_bias else None
        return weight_format.linear(weight, bias, self.kernels)

    def _weight(self, prefix: str, name: str, read: ReadWeight) -> tuple[WeightFormat, Weight]:
        """The weight of a fused linear map, and its format."""
        names = [f"{prefix}{part}.weight" for part in self.spec.linears()[name][0]]
        weight_format = self.format_of(names[0])
        return weight_format, weight_format.join([read(name) for name in names], self._row_order(name))

    def _row_order(self, name: str) -> torch.Tensor | None:
        """The order of the rows of q and k that `rope_table` needs if only some dimensions of a head are rotated."""
        if name != "qkv" or self.spec.rope.partial in (0.0, 1.0):
            return None
        heads = torch.arange(self.spec.num_heads + self.spec.num_kv_heads)
        return (heads[:, None] * self.spec.head_dim + rope_permutation(self.spec)).flatten()

    def _experts(self, prefix: str, spec: ExpertsSpec, read: ReadWeight) -> ExpertLayer:
        router = self.kernels.linear(read(f"{prefix}router.weight")[0], None)
        prefixes = [f"{prefix}experts.{e}." for e in range(spec.num_experts)]
        weights = ((self._weight(p, "gate_up", read)[1], self._weight(p, "down", read)[1]) for p in prefixes)
        weight_format = self.format_of(f"{prefixes[0]}down.weight")
        return weight_format.experts(spec, router, weights, self.kernels)

    def _norm(self, name: str, read: ReadWeight) -> torch.Tensor:
        (weight,) = read(name)
        return weight if self.spec.norm == "rms" else torch.stack((weight, *read(f"{name}_bias")))

    @classmethod
    def load(
        cls, source: TensorSource, spec: DecoderSpec, weight_map: WeightMap, numerics: Numerics, num_positions: int
    ) -> Decoder:
        """From a checkpoint with the tensors of the weight map, which are all checked before any is read."""
        read = read_from(source, spec, weight_map, numerics)
        start = time.perf_counter()
        decoder = cls(spec, numerics, num_positions, read)
        if numerics.device.type == "cuda":
            torch.cuda.synchronize()
        size = weight_bytes(spec, numerics)
        logger.info("weights: %.2f GiB read in %.1f s", size / (1 << 30), time.perf_counter() - start)
        return decoder

    @classmethod
    def dummy(cls, spec: DecoderSpec, numerics: Numerics, num_positions: int, seed: int = 0) -> Decoder:
        """With seeded random weights; for tests and benchmarks."""
        return cls(spec, numerics, num_positions, draw(spec, numerics, seed))

    def forward(
        self,
        batch: ForwardBatch,
        caches: list[KVLayer],
    ) -> torch.Tensor:
        """[num_tokens, hidden] before the final norm; writes the tokens' keys and values."""
        spec, kernels = self.spec, self.kernels
        eps, heads = spec.norm_eps, (len(batch.token_ids), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        ropes = [kernels.rope_rows(table, batch.positions) for table in self.ropes]
        h = F.embedding(batch.token_ids, self.embed)
        if self.embed_scale != 1.0:
            h.mul_(self.embed_scale)
        if self.position_embed is not None:
            h.add_(F.embedding(batch.positions, self.position_embed))
        for layer, (kv, scales) in zip(self.layers, caches, strict=True):
            qkv = layer.qkv.normed(h, layer.attn_norm, eps).view(heads)
            norms = layer.q_norm, layer.k_norm
            q = kernels.rope_store_kv(qkv, ropes[layer.rope], kv, batch.kv_index, *norms, eps, scales)
            layer.out.add_to(h, layer.attention(q, kv, batch.attention, scales), layer.post_attn_norm, eps)
            if isinstance(layer.feed_forward, Mlp):
                gate_up, down = layer.feed_forward
                gate_up.gated_into(down, h, layer.ffn_norm, eps, layer.post_ffn_norm)
            else:
                layer.feed_forward.add_to(h, layer.ffn_norm, eps)
        return h

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden] of `forward` -> [n, vocab]; in `out`, float32, if given (Triton backend)."""
        logits, cap = self.head.logits(hidden, self.final_norm, self.spec.norm_eps, out), self.spec.logit_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def rope_permutation(spec: DecoderSpec) -> torch.Tensor:
    """[head_dim]: the order of a head's dimensions in which i is rotated with i + head_dim / 2 (see rope_table).

    Checkpoints in which only the first dimensions are rotated pair those among themselves. Scores do not change when
    q and k are reordered alike."""
    dims, rotary_dim = torch.arange(spec.head_dim), int(spec.head_dim * spec.rope.partial)
    halves = zip(dims[:rotary_dim].tensor_split(2), dims[rotary_dim:].tensor_split(2), strict=True)
    return torch.cat([part for half in halves for part in half])
