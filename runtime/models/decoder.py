"""The decoder: one forward pass, assembled from a spec and written with the operations of runtime.kernels."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from runtime.kernels.attention.rope import query_scale_table, rope_table
from runtime.kernels.attention.stored_kv import KVLayer
from runtime.kernels.collectives.communicator import Communicator, OneRank
from runtime.kernels.collectives.divided_linear import (
    ColumnLeaves,
    ExpertLeaves,
    ReducedExperts,
    ReducedLinear,
    by_leaves_of_inputs,
    sum_of_leaves,
)
from runtime.kernels.collectives.heads_norm import HeadsNorm, HeadsWeight
from runtime.kernels.experts.moe_w16a16 import ExpertLayer, Experts
from runtime.kernels.linear.linear_torch import Linear, Product
from runtime.kernels.linear.lora import Adapters, RowAdapters
from runtime.kernels.numerics import Numerics
from runtime.kernels.table import select
from runtime.models.forward_batch import AttentionMetadata, ForwardBatch
from runtime.models.lora import DecoderAdapters
from runtime.models.weight_map import WeightMap
from runtime.models.weights import ReadWeight, draw, read_from
from runtime.quant.model_formats import weight_bytes, weight_formats
from runtime.quant.weight_format import DENSE, TensorSource, Weight, WeightFormat
from runtime.spec.decoder_spec import DecoderSpec, ExpertsSpec, RopeSpec
from runtime.spec.sharding import leaves_of

logger = logging.getLogger(__name__)


_SUMS = ("out", "down")  # maps of which a rank has some inputs


class Mlp(NamedTuple):
    """A feed-forward layer."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """One block's weights, fused: q, k and v are one linear map, gate and up another."""

    attn_norm: torch.Tensor | None  # [hidden]; a layer norm's with its bias, [2, hidden]; with spec.pre_norms
    post_attn_norm: torch.Tensor | None  # with spec.post_norms
    q_norm: torch.Tensor | None  # [head_dim], with spec.qk_norm of each head
    k_norm: torch.Tensor | None
    heads_norm: HeadsNorm | None  # with spec.qk_norm over all heads
    qkv: Linear
    rope: int  # index of its rotary table
    # Of q, the layer's cache, the step's metadata and the cache's scales, with the layer's scale, window and soft cap.
    attention: Callable[[torch.Tensor, torch.Tensor, AttentionMetadata, torch.Tensor | None], torch.Tensor]
    out: Linear
    ffn_norm: torch.Tensor | None
    post_ffn_norm: torch.Tensor | None
    feed_forward: Mlp | ExpertLayer


class Decoder:
    """A decoder-only transformer with pre-norm blocks and grouped-query attention, as its spec says; or what one rank
    computes of it. Hidden states are whole on all ranks; sums over ranks are in `ReducedLinear.add_to`."""

    def __init__(
        self,
        spec: DecoderSpec,
        numerics: Numerics,
        num_positions: int,  # the most positions of a request
        read: ReadWeight,
        communicator: Communicator | None = None,  # of the spec's rank
    ) -> None:
        self.communicator = communicator or OneRank()
        self.spec, self.numerics, self.num_positions = spec, numerics, num_positions
        self.kernels = select(numerics, spec)
        self.format_of = weight_formats(spec, numerics)
        table = partial(rope_table, head_dim=spec.head_dim, num_positions=num_positions, dtype=numerics.dtype)
        self.rope_specs = list(dict.fromkeys(self._rope(i) for i in range(spec.num_layers)))
        self.ropes = [table(rope).to(numerics.device) for rope in self.rope_specs]
        scales = query_scale_table(spec.rope, num_positions)
        self.query_scales = None if scales is None else scales.to(numerics.device)
        (self.embed,) = read("embed")
        self.embed_scale = float(torch.tensor(spec.embed_scale, dtype=numerics.dtype))
        self.position_embed = read("positions")[0] if spec.learned_positions else None
        self.layers = [self._layer(i, read) for i in range(spec.num_layers)]
        self.adapters: DecoderAdapters | None = None  # where there is room for any
        self.final_norm = self.head_norm = self._norm("final_norm", read)
        if spec.logit_scale != 1.0:  # of what the head is multiplied with, in float32, which norms take too
            self.head_norm = self.final_norm.float() * spec.logit_scale
        head = self.format_of("head")
        weight = head.encode(self.embed) if spec.tied_head else read("head")
        self.head = self._columns(["head"], head, weight, None)

    def _layer(self, index: int, read: ReadWeight) -> Layer:
        spec, prefix = self.spec, f"layers.{index}."
        sliding = bool(spec.sliding) and spec.sliding[index]
        attn_norm, ffn_norm = (
            self._norm(prefix + n, read) if spec.pre_norms else None for n in ("attn_norm", "ffn_norm")
        )
        post_attn_norm, post_ffn_norm = (
            self._norm(prefix + n, read) if spec.post_norms else None for n in ("post_attn_norm", "post_ffn_norm")
        )
        of_each_head = spec.qk_norm and not spec.qk_norm_all_heads
        q_norm, k_norm = (self._turned(prefix + n, read) if of_each_head else None for n in ("q_norm", "k_norm"))
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
            heads_norm=self._heads_norm(prefix, read) if spec.qk_norm_all_heads else None,
            qkv=qkv,
            rope=self.rope_specs.index(self._rope(index)),
            attention=attention,
            out=out,
            ffn_norm=ffn_norm,
            post_ffn_norm=post_ffn_norm,
            feed_forward=feed_forward,
        )

    def _rope(self, index: int) -> RopeSpec:
        """A layer's rotary positions."""
        spec = self.spec
        if spec.no_rope and spec.no_rope[index]:
            return RopeSpec(partial=0.0)
        return spec.local_rope if spec.local_rope is not None and spec.sliding[index] else spec.rope

    def _linear(self, prefix: str, name: str, read: ReadWeight) -> Linear:
        """A fused linear map."""
        if name in _SUMS:
            return self._sum(prefix, name, read)
        weight_format, weight = self._weight(prefix, name, read)
        parts, bias = [f"{prefix}{part}" for part in self.spec.linears()[name][0]], self._bias(prefix, name, read)
        return self._columns([f"{part}.weight" for part in parts], weight_format, weight, bias)

    def _sum(self, prefix: str, name: str, read: ReadWeight) -> Linear:
        """A linear map of some inputs, whose results are added up over ranks."""
        if self.numerics.rank_invariant:
            leaves = self._input_leaves(prefix, name, read)
            product = by_leaves_of_inputs(leaves)
            linear = Linear(lambda x: sum_of_leaves(product(x), len(leaves)), self.kernels.norm, self.kernels.activate)
        else:
            weight_format, weight = self._weight(prefix, name, read)
            linear = weight_format.linear(weight, self._bias(prefix, name, read), self.kernels)
            if self.communicator.size == 1:
                return linear
        return ReducedLinear(linear, self.communicator)

    def _bias(self, prefix: str, name: str, read: ReadWeight) -> torch.Tensor | None:
        parts, has_bias = self.spec.linears()[name]
        if not has_bias:
            return None
        bias = DENSE.join([read(f"{prefix}{part}.bias") for part in parts], self.row_order(name))[0]
        return None if name in _SUMS and self.spec.shard.rank else bias  # the first rank's is added

    def _weight(self, prefix: str, name: str, read: ReadWeight) -> tuple[WeightFormat, Weight]:
        """The weight of a fused linear map, and its format."""
        names = [f"{prefix}{part}.weight" for part in self.spec.linears()[name][0]]
        weight_format = self.format_of(names[0])
        return weight_format, weight_format.join([read(name) for name in names], self.row_order(name))

    def _columns(
        self, names: list[str], weight_format: WeightFormat, weight: Weight, bias: torch.Tensor | None
    ) -> Linear:
        """The map of some outputs with the weights of these parameters, or with their leaves."""
        if not self.numerics.rank_invariant:
            return weight_format.linear(weight, bias, self.kernels)
        sizes = [leaf.stop - leaf.start for name in names for leaf in leaves_of(self.spec, name)]

        def leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
            split = tensor.split([size * len(tensor) // sum(sizes) for size in sizes])
            return [leaf.clone() for leaf in split]  # aligned, which a library's sums may depend on

        weights = zip(*map(leaves, weight), strict=True)
        biases = [None] * len(sizes) if bias is None else leaves(bias)
        pairs = zip(weights, biases, strict=True)
        return ColumnLeaves([weight_format.linear(leaf, own_bias, self.kernels) for leaf, own_bias in pairs])

    def _input_leaves(self, prefix: str, name: str, read: ReadWeight) -> list[tuple[int, Product]]:
        """The leaves of a map of some inputs, with the number of these."""
        parameter = f"{prefix}{name}.weight"
        leaves, weight_format = leaves_of(self.spec, parameter), self.format_of(parameter)
        weights = [read(parameter, leaf) for leaf in leaves]
        biases = [self._bias(prefix, name, read), *[None] * (len(leaves) - 1)]
        return [
            (leaf.stop - leaf.start, weight_format.linear(weight, bias, self.kernels).product)
            for leaf, weight, bias in zip(leaves, weights, biases, strict=True)
        ]

    def row_order(self, name: str) -> torch.Tensor | None:
        """The order of the rows of q and k that `rope_table` needs, if it is not the checkpoint's."""
        if name != "qkv" or not self.spec.rope.reorders_heads:
            return None
        heads = torch.arange(self.spec.num_heads + self.spec.num_kv_heads)
        return (heads[:, None] * self.spec.head_dim + rope_permutation(self.spec)).flatten()

    def _experts(self, prefix: str, spec: ExpertsSpec, read: ReadWeight) -> ExpertLayer:
        router = self.kernels.linear(read(f"{prefix}router.weight")[0], None)
        prefixes = [f"{prefix}experts.{e}." for e in range(spec.num_experts)]
        if self.numerics.rank_invariant:
            products = [
                (self._linear(p, "gate_up", read).product, by_leaves_of_inputs(self._input_leaves(p, "down", read)))
                for p in prefixes
            ]
            mixture = Experts(spec, router, products, lambda product: product, self.kernels.activate)
            num_leaves = len(leaves_of(self.spec, f"{prefixes[0]}down.weight"))
            return ExpertLeaves(mixture, num_leaves, self.communicator)
        weights = ((self._weight(p, "gate_up", read)[1], self._weight(p, "down", read)[1]) for p in prefixes)
        weight_format = self.format_of(f"{prefixes[0]}down.weight")
        layer = weight_format.experts(spec, router, weights, self.kernels)
        return layer if self.communicator.size == 1 else ReducedExperts(layer, self.communicator)

    def _heads_norm(self, prefix: str, read: ReadWeight) -> HeadsNorm:
        by_leaves, weights = self.numerics.rank_invariant, []
        for name in (f"{prefix}q_heads_norm", f"{prefix}k_heads_norm"):
            weight = self._turned(name, read)
            leaves = [leaf.stop - leaf.start for leaf in leaves_of(self.spec, name)] if by_leaves else [len(weight)]
            weights.append(HeadsWeight(weight, leaves))
        norm = None if by_leaves or self.communicator.size > 1 else self.kernels.norm_in_place
        return HeadsNorm(weights, self.spec.norm_eps, norm, self.communicator)

    def _turned(self, name: str, read: ReadWeight) -> torch.Tensor:
        """The weight of a norm of q or k, in the order that `rope_table` needs."""
        return read(name)[0].view(-1, self.spec.head_dim)[:, rope_permutation(self.spec)].flatten()

    def _norm(self, name: str, read: ReadWeight) -> torch.Tensor:
        (weight,) = read(name)
        return weight if self.spec.norm == "rms" else torch.stack((weight, *read(f"{name}_bias")))

    @classmethod
    def load(
        cls,
        source: TensorSource,
        spec: DecoderSpec,
        weight_map: WeightMap,
        numerics: Numerics,
        num_positions: int,
        communicator: Communicator | None = None,
    ) -> Decoder:
        """From a checkpoint with the tensors of the weight map, which are all checked before any is read."""
        read = read_from(source, spec, weight_map, numerics)
        start = time.perf_counter()
        decoder = cls(spec, numerics, num_positions, read, communicator)
        if numerics.device.type == "cuda":
            torch.cuda.synchronize()
        size = weight_bytes(spec, numerics)
        logger.info("weights: %.2f GiB read in %.1f s", size / (1 << 30), time.perf_counter() - start)
        return decoder

    @classmethod
    def dummy(
        cls,
        spec: DecoderSpec,
        numerics: Numerics,
        num_positions: int,
        seed: int = 0,
        communicator: Communicator | None = None,
    ) -> Decoder:
        """With seeded random weights; for tests and benchmarks."""
        return cls(spec, numerics, num_positions, draw(spec, numerics, seed), communicator)

    def forward(
        self,
        batch: ForwardBatch,
        caches: list[KVLayer],
    ) -> torch.Tensor:
        """[num_tokens, hidden] before the final norm; writes the tokens' keys and values."""
        spec, kernels = self.spec, self.kernels
        eps, heads = spec.norm_eps, (len(batch.token_ids), spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        ropes = [kernels.rope_rows(table, batch.positions) for table in self.ropes]
        query_scales = None if self.query_scales is None else self.query_scales.index_select(0, batch.positions)
        h = self._embedded(batch.token_ids)
        if self.embed_scale != 1.0:
            h.mul_(self.embed_scale)
        if self.position_embed is not None:
            h.add_(F.embedding(batch.positions, self.position_embed))
        layers = self.layers if batch.adapters is None else self._adapted_layers(batch.adapters)
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
                assert layer.ffn_norm is not None  # which all families with experts have
                layer.feed_forward.add_to(h, layer.ffn_norm, eps)
        return h

    def _adapted_layers(self, rows: torch.Tensor) -> list[Layer]:
        """The layers for a step whose rows have these adapters, by their indices [num_tokens]."""
        assert self.adapters is not None
        if len(rows) == 1:
            self.adapters.clear_results()
        add = self.kernels.add_adapters

        def adapted(linear: Linear, adapters: Adapters) -> Linear:
            return linear.with_adapters(RowAdapters(rows, adapters, add))

        layers = []
        for layer, of in zip(self.layers, self.adapters.layers, strict=True):
            ffn = layer.feed_forward
            if isinstance(ffn, Mlp):
                ffn = Mlp(adapted(ffn.gate_up, of["gate_up"]), adapted(ffn.down, of["down"]))
            qkv, out = adapted(layer.qkv, of["qkv"]), adapted(layer.out, of["out"])
            layers.append(replace(layer, qkv=qkv, out=out, feed_forward=ffn))
        return layers

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden], which the rank has that has the token."""
        if self.communicator.size == 1:
            return F.embedding(token_ids, self.embed)
        places = token_ids - self.spec.token_ids.start
        elsewhere = (places < 0) | (places >= len(self.embed))
        own = F.embedding(places.masked_fill_(elsewhere, 0), self.embed)
        return self.communicator.reduced(own.masked_fill_(elsewhere[:, None], 0))

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] of `forward`, after the final norm."""
        return self.kernels.norm(hidden, self.final_norm, self.spec.norm_eps)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[n, hidden] of `forward` -> [n, vocab], of a rank those of its `spec.token_ids`; in `out`, float32, if given
        (Triton backend)."""
        logits, cap = self.head.logits(hidden, self.head_norm, self.spec.norm_eps, out), self.spec.logit_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def rope_permutation(spec: DecoderSpec) -> torch.Tensor:
    """[head_dim]: the order of a head's dimensions in which i is rotated with i + head_dim / 2 (see rope_table).

    Checkpoints in which only the first dimensions are rotated pair those among themselves, and some pair neighbours.
    Scores do not change when q and k are reordered alike."""
    dims, rotary_dim = torch.arange(spec.head_dim), int(spec.head_dim * spec.rope.partial)
    turned, others = dims[:rotary_dim], dims[rotary_dim:]
    pairs = (turned[::2], turned[1::2]) if spec.rope.interleaved else turned.tensor_split(2)
    halves = zip(pairs, others.tensor_split(2), strict=True)
    return torch.cat([part for half in halves for part in half])
