"""Builds a Decoder: reads or draws its parameters, and makes layers of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from runtime.base.model.decoder_spec import AttentionSpec, DecoderSpec
from runtime.base.model.latent_spec import LatentSpec
from runtime.base.model.layer_spec import MixerSpec
from runtime.base.model.mixer_spec import DeltaRuleSpec, ShortConvSpec
from runtime.base.types import CallboardError
from runtime.kernels.attention.rope import query_scale_table, rope_axes, rope_table
from runtime.kernels.collectives.communicator import Communicator, OneRank
from runtime.kernels.experts.dense_beside import DenseBeside
from runtime.kernels.experts.moe_torch import ExpertLayer
from runtime.kernels.numerics import Numerics
from runtime.kernels.operations import ZEROS_LIKE
from runtime.kernels.table import select
from runtime.models.decoder import Decoder, Layer, LayerStack, Mlp
from runtime.models.layer_inputs import LayerEmbedding, LayerInput
from runtime.models.linear_maps import FormatOf, LinearMaps
from runtime.models.mixers.attention import AttentionMixer
from runtime.models.mixers.delta_rule import DeltaRuleMixer
from runtime.models.mixers.latent import LatentMixer
from runtime.models.mixers.mixer import Mixer
from runtime.models.mixers.short_conv import ShortConvMixer
from runtime.models.rank_maps import sharded
from runtime.models.weight_map import WeightMap
from runtime.models.weights import LoadProgress, ReadWeight, draw, read_from
from runtime.quant.model_formats import weight_formats
from runtime.quant.weight_format import TensorSource

_WITH_STATES: dict[type[MixerSpec], Callable[[Any, LinearMaps, str], Mixer]] = {
    DeltaRuleSpec: DeltaRuleMixer.build,
    ShortConvSpec: ShortConvMixer.build,
}


def load_decoder(
    source: TensorSource,
    spec: DecoderSpec,
    weight_map: WeightMap,
    numerics: Numerics,
    num_positions: int,
    communicator: Communicator | None = None,
) -> Decoder:
    """A decoder with the weights of a checkpoint. All tensors are checked before any is read."""
    read, progress = read_from(source, spec, weight_map, numerics), LoadProgress(spec, numerics)
    decoder = build_decoder(spec, numerics, num_positions, progress.watched(read), communicator)
    if numerics.device.type == "cuda":
        torch.cuda.synchronize()
    progress.finish()
    return decoder


def draw_decoder(
    spec: DecoderSpec, numerics: Numerics, num_positions: int, seed: int = 0, communicator: Communicator | None = None
) -> Decoder:
    """A decoder with seeded random weights, for tests and benchmarks."""
    return build_decoder(spec, numerics, num_positions, draw(spec, numerics, seed), communicator)


def build_decoder(
    spec: DecoderSpec,
    numerics: Numerics,
    num_positions: int,  # a request's most positions
    read: ReadWeight,
    communicator: Communicator | None = None,  # the spec's rank's
    builder: Callable[[LinearMaps, int], LayerBuilder] | None = None,  # LayerBuilder
) -> Decoder:
    """A decoder of the parameters that `read` returns."""
    ranks = communicator or OneRank()
    return layer_builder(spec, numerics, num_positions, read, ranks, builder).decoder(numerics, ranks)


def layer_builder(
    spec: DecoderSpec,
    numerics: Numerics,
    num_positions: int,
    read: ReadWeight,
    communicator: Communicator,
    builder: Callable[[LinearMaps, int], LayerBuilder] | None = None,  # LayerBuilder
) -> LayerBuilder:
    """A builder for a decoder, or for the layers of a head, with kernels of their own."""
    maps = LinearMaps(spec, select(numerics, spec), weight_formats(spec, numerics), read)
    return (builder or LayerBuilder)(sharded(maps, communicator, numerics.rank_invariant), num_positions)


def builder_beside(decoder: Decoder, format_of: FormatOf, read: ReadWeight, num_positions: int) -> LayerBuilder:
    """Return a builder for a decoder's parts with other weights. They share its kernels and communicator."""
    maps = LinearMaps(decoder.spec, decoder.kernels, format_of, read)
    return LayerBuilder(sharded(maps, decoder.communicator, decoder.numerics.rank_invariant), num_positions)


class LayerBuilder:
    """Reads the parameters of a decoder: all in their order, or one part's."""

    def __init__(self, maps: LinearMaps, num_positions: int) -> None:
        self.maps, self.spec, self.dense, self.num_positions = maps, maps.spec, maps.dense, num_positions
        self.ropes = list(dict.fromkeys((mixer.rope, mixer.rope_dim) for mixer in self.spec.attentions.values()))

    def decoder(self, numerics: Numerics, ranks: Communicator) -> Decoder:
        """The whole decoder."""
        embed = self.maps.embedding()
        positions, layer_embed = self.positions(), self.layer_embed()
        layers = self.stack(numerics, ranks)
        final_norm, head_norm = self.final_norms()
        return Decoder(
            **{field.name: getattr(layers, field.name) for field in fields(layers)},
            embed=embed.table,
            embed_tokens=embed.lookup,
            position_embed=positions,
            layer_embed=layer_embed,
            final_norm=final_norm,
            head_norm=head_norm,
            head=self.maps.head(embed.table),
        )

    def stack(self, numerics: Numerics, ranks: Communicator) -> LayerStack:
        """All layers, without embedding, final norm and head."""
        table = partial(rope_table, num_positions=self.num_positions, dtype=numerics.dtype)
        scales, device = query_scale_table(self.ropes[0][0], self.num_positions), numerics.device
        return LayerStack(
            spec=self.spec,
            numerics=numerics,
            kernels=self.maps.kernels,
            communicator=ranks,
            ropes=[table(rope, head_dim).to(device) for rope, head_dim in self.ropes],
            rope_axes=[rope_axes(rope, head_dim).to(device) for rope, head_dim in self.ropes],
            query_scales=None if scales is None else scales.to(device),
            layers=[self.layer(i) for i in range(self.spec.num_layers)],
        )

    def positions(self) -> torch.Tensor | None:
        """The learned positions, if there are any."""
        return self.dense("positions") if self.spec.learned_positions else None

    def layer_embed(self) -> LayerEmbedding | None:
        """The embeddings of tokens that layers have, if there are any."""
        spec, maps, name = self.spec, self.maps, "layer_embed_map.weight"
        if not spec.layer_embed_size:
            return None
        lookup = maps.embedding("layer_embed").lookup
        hidden_map = maps.kernels.linear([maps.read(name).operand], None)
        weight = self.dense("layer_embed_norm").float() * 0.5**0.5
        # The map has the factor hidden_size ** -0.5. Without it, the norm differs only by its epsilon.
        eps = spec.norm_eps * spec.hidden_size
        return LayerEmbedding(lookup, hidden_map, weight, spec.layer_embed_size, maps.kernels.norm, eps)

    def final_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The final norm, and that with the logit scale."""
        final_norm = self.norm("final_norm")
        if self.spec.logit_scale == 1.0:
            return final_norm, final_norm
        return final_norm, final_norm.float() * self.spec.logit_scale  # applied in float32, before the head

    def layer(self, index: int) -> Layer:
        """A layer."""
        spec, maps, prefix = self.spec.layers[index], self.maps, f"layers.{index}."
        norms = {name: self.norm(prefix + name) for name in spec.norms}
        mixer, post_ffn_norm = self._mixer(spec.mixer, prefix), norms.get("post_ffn_norm")
        feed_forward: Mlp | ExpertLayer
        if spec.ffn.experts is None:
            feed_forward = Mlp(maps.linear(prefix, "gate_up"), maps.linear(prefix, "down"))
        else:
            feed_forward = maps.experts(prefix, spec.ffn.experts)
            if spec.ffn.beside:
                assert post_ffn_norm is not None
                feed_forward = self._dense_beside(prefix, feed_forward, post_ffn_norm)
        return Layer(
            norms.get("attn_norm"),
            norms.get("post_attn_norm"),
            mixer,
            norms.get("ffn_norm"),
            post_ffn_norm,
            feed_forward,
            input=self._layer_input(index, prefix) if spec.embed_size else None,
            factor=self.dense(f"{prefix}factor") if spec.has_factor else None,
        )

    def _mixer(self, spec: MixerSpec, prefix: str) -> Mixer:
        if (build := _WITH_STATES.get(type(spec))) is not None:
            return build(spec, self.maps, prefix)
        if not isinstance(spec, AttentionSpec | LatentSpec):
            kind = type(spec).__name__
            raise CallboardError(f"The model has layers of {kind}, whose mixer this build lacks; use a complete build.")
        rope = self.ropes.index((spec.rope, spec.rope_dim))
        if isinstance(spec, LatentSpec):
            return LatentMixer.build(spec, self.maps, prefix, rope)
        return AttentionMixer.build(spec, self.maps, prefix, rope, self.num_positions)

    def _dense_beside(self, prefix: str, experts: ExpertLayer, post_norm: torch.Tensor) -> DenseBeside:
        gate_up, down = (self.maps.linear(prefix, name) for name in ("dense_gate_up", "dense_down"))
        before, dense_norm, expert_norm = (
            self.norm(prefix + name) for name in ("experts_norm", "post_dense_norm", "post_experts_norm")
        )
        kernels = self.maps.kernels
        norms = before, dense_norm, expert_norm, post_norm
        return DenseBeside(gate_up, down, experts, *norms, kernels.norm, kernels[ZEROS_LIKE])

    def _layer_input(self, index: int, prefix: str) -> LayerInput:
        gate, out = (self.maps.whole(prefix, name) for name in ("layer_gate", "layer_out"))
        return LayerInput(index, gate, out, self.norm(f"{prefix}post_layer_norm"), self.maps.kernels.gate_by)

    def norm(self, name: str) -> torch.Tensor:
        """A norm's weight."""
        weight = self.dense(name)
        return weight if self.spec.norm == "rms" else torch.stack((weight, self.dense(f"{name}_bias")))
