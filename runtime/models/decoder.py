"""Decoder: one forward pass, written with the operations of runtime.kernels. `decoder_build.py` assembles it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.kernels.attention.rope import rope_table_of_step
from runtime.kernels.collectives.communicator import Communicator
from runtime.kernels.experts.moe_torch import ExpertLayer
from runtime.kernels.linear.linear_torch import Linear
from runtime.kernels.numerics import Numerics
from runtime.kernels.operations import MULTIPLY, ROPE_ROWS, SOFT_CAP
from runtime.kernels.table import Kernels
from runtime.models.forward_batch import ForwardBatch
from runtime.models.layer_inputs import LayerEmbedding, LayerInput
from runtime.models.mixers.mixer import ForwardStep, LayerCache, Mixer

_PADDING = 0  # Gemma 4's pad_token_id


@dataclass(eq=False, kw_only=True)
class LayerStack:
    """Consecutive layers: in each, a mixer and a feed-forward part add to the hidden states.

    Hidden states are whole on all ranks: a mixer's `out` and `down` sum over ranks (`ReducedLinear`)."""

    spec: DecoderSpec
    numerics: Numerics
    kernels: Kernels
    communicator: Communicator  # the spec's rank's
    ropes: list[torch.Tensor]  # rotary tables
    rope_axes: list[torch.Tensor]  # which position turns each column of a table
    query_scales: torch.Tensor | None  # [num_positions, ...] q's scales by position
    layers: list[Layer]
    adapters: LayerAdapters | None = None  # None unless there is room for adapters

    def run(
        self,
        h: torch.Tensor,
        batch: ForwardBatch,
        caches: Sequence[LayerCache],
        layer_inputs: torch.Tensor | None = None,  # with spec.layer_embed_size
        first_input: torch.Tensor | None = None,  # what the first mixer reads in place of h
    ) -> torch.Tensor:
        """Change [num_tokens, hidden] in place to what leaves the last layer, and return it.

        Writes keys, values and states of the tokens into the caches. With `batch.only_stores` the result is
        the last layer's projections."""
        eps = self.spec.norm_eps
        query_scales = None if self.query_scales is None else self.query_scales.index_select(0, batch.positions)
        step = ForwardStep(batch, self._ropes(batch), query_scales, layer_inputs)
        layers = self.layers
        if batch.adapters is not None:
            assert self.adapters is not None
            layers = self.adapters.adapted(layers, batch.adapters)
        for index, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
            if batch.taps is not None:
                batch.taps.take(index, h)
            x = h if first_input is None or index else first_input
            if batch.only_stores and index == len(layers) - 1:
                return layer.mixer.store(x, layer.attn_norm, step, cache)[1]
            layer.mixer.out.add_to(h, layer.mixer.mix(x, layer.attn_norm, step, cache), layer.post_attn_norm, eps)
            if isinstance(layer.feed_forward, Mlp):
                gate_up, down = layer.feed_forward
                gate_up.gated_into(down, h, layer.ffn_norm, eps, layer.post_ffn_norm)
            else:
                assert layer.ffn_norm is not None  # all families with experts have it
                layer.feed_forward.add_to(h, layer.ffn_norm, eps)
            if layer.input is not None:
                assert step.layer_inputs is not None
                layer.input.add_to(h, step.layer_inputs, eps)
            if layer.factor is not None:
                self.kernels[MULTIPLY](h, layer.factor)
            if batch.embeds is not None:
                batch.embeds.add_after(index, h)
        if batch.taps is not None:
            batch.taps.take(len(layers), h)
        return h

    def _ropes(self, batch: ForwardBatch) -> list[Any]:
        """The tokens' rows of each rotary table, as kernels read them."""
        rows, tables, positions = self.kernels[ROPE_ROWS], self.ropes, batch.rope_positions
        if positions is None:
            return [rows(table, batch.positions) for table in tables]
        each = torch.arange(positions.shape[1], dtype=batch.positions.dtype, device=positions.device)
        parts = zip(tables, self.rope_axes, strict=True)
        return [rows(rope_table_of_step(table, axes, positions), each) for table, axes in parts]


@dataclass(eq=False, kw_only=True)
class Decoder(LayerStack):
    """A decoder-only model, or one rank's share of it: layers between an embedding and an output head."""

    embed: Any  # [own tokens, hidden], as kernels have it
    embed_tokens: Callable[[torch.Tensor, float], torch.Tensor]  # token ids, a factor -> [num_tokens, hidden]
    position_embed: torch.Tensor | None  # [num_positions, hidden], with spec.learned_positions
    layer_embed: LayerEmbedding | None  # None without spec.layer_embed_size
    final_norm: torch.Tensor
    head_norm: torch.Tensor  # the final norm with the logit scale
    head: Linear

    def __post_init__(self) -> None:
        self.embed_scale = float(torch.tensor(self.spec.embed_scale, dtype=self.numerics.dtype))

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> torch.Tensor:
        """[num_tokens, hidden] before the final norm. Writes keys, values and states of the tokens into the caches."""
        h = self.embedded(batch)
        layer_inputs = None if self.layer_embed is None else self.layer_embed.inputs(self._own_tokens(batch), h)
        return self.run(h, batch, caches, layer_inputs)

    def embedded(self, batch: ForwardBatch) -> torch.Tensor:
        """[num_tokens, hidden] of the token embedding, with positions if they are learned."""
        h = self.embed_tokens(batch.token_ids, self.embed_scale)
        if self.position_embed is not None:
            h.add_(F.embedding(batch.positions, self.position_embed))
        if batch.embeds is not None:
            h[batch.embeds.tokens] = batch.embeds.embeddings[:, : h.shape[1]]
        return h

    def _own_tokens(self, batch: ForwardBatch) -> torch.Tensor:
        """Token ids, with padding in place of images."""
        if batch.embeds is None:
            return batch.token_ids
        return batch.token_ids.index_fill(0, batch.embeds.tokens, _PADDING)

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] of `forward`, after the final norm."""
        return self.kernels.norm(hidden, self.final_norm, self.spec.norm_eps)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Map `forward`'s [n, hidden] to [n, vocab], or a rank's `spec.token_ids`. Writes them into `out`, float32,
        if given (Triton backend)."""
        return self.logits_after(hidden, self.head_norm, self.spec.norm_eps, out)

    def logits_after(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
        head: Linear | None = None,
    ) -> torch.Tensor:
        """The same with another norm, which has the logit scale, before the output head or its copy `head`."""
        logits, cap = (head or self.head).logits(hidden, norm, eps, out), self.spec.logit_soft_cap
        return self.kernels[SOFT_CAP](logits, cap) if cap else logits


class Mlp(NamedTuple):
    """A feed-forward layer."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one block. Gate and up are one linear map."""

    attn_norm: torch.Tensor | None  # [hidden], or [2, hidden] with a layer norm's bias; None without spec.pre_norms
    post_attn_norm: torch.Tensor | None  # None without spec.post_norms
    mixer: Mixer
    ffn_norm: torch.Tensor | None
    post_ffn_norm: torch.Tensor | None
    feed_forward: Mlp | ExpertLayer
    input: LayerInput | None = None  # None without spec.layer_embed_size
    factor: torch.Tensor | None = None  # [1] for the hidden states after the layer; None without spec.layer_factors


class LayerAdapters(Protocol):
    """Adapters (LoRA) on the layers' maps."""

    def adapted(self, layers: Sequence[Layer], rows: torch.Tensor) -> list[Layer]:
        """The layers for a step. `rows` [num_tokens] has the adapter index of each token."""
