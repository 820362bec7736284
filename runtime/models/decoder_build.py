"""Builds a Decoder: reads or draws its parameters, and makes layers of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from runtime.base.model.decoder_spec import DecoderSpec, RopeSpec
from runtime.base.model.latent_spec import LatentSpec
from runtime.base.model.mixer_spec import DeltaRuleSpec
from runtime.kernels.attention.rope import Heads, query_scale_table, rope_table
from runtime.kernels.collectives.communicator import Communicator, OneRank
from runtime.kernels.experts.dense_beside import DenseBeside
from runtime.kernels.experts.moe_torch import ExpertLayer
from runtime.kernels.numerics import Numerics
from runtime.kernels.table import select
from runtime.models.decoder import Decoder, DecoderWeights, Layer, Mlp
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
    num_positions: int,  # the most positions of a request
    read: ReadWeight,
    communicator: Communicator | None = None,  # of the spec's rank
) -> Decoder:
    """A decoder of the parameters that `read` returns."""
    kernels, ranks = select(numerics, spec), communicator or OneRank()
    maps = LinearMaps(spec, kernels, weight_formats(spec, numerics), read)
    builder = LayerBuilder(sharded(maps, ranks, numerics.rank_invariant), num_positions)
    weights = builder.weights(numerics)
    return Decoder(spec, numerics, kernels, ranks, weights)


def builder_beside(decoder: Decoder, format_of: FormatOf, read: ReadWeight, num_positions: int) -> LayerBuilder:
    """A builder of parts of a decoder with other weights. They share its kernels and its communicator."""
    maps = LinearMaps(decoder.spec, decoder.kernels, format_of, read)
    return LayerBuilder(sharded(maps, decoder.communicator, decoder.numerics.rank_invariant), num_positions)


class LayerBuilder:
    """Reads the parameters of a decoder: all in their order, or one part's."""

    def __init__(self, maps: LinearMaps, num_positions: int) -> None:
        self.maps, self.spec, self.dense, self.num_positions = maps, maps.spec, maps.dense, num_positions
        self.rope_specs = list(dict.fromkeys(self._rope(i) for i in range(self.spec.num_layers)))  # with the head_dim

    def weights(self, numerics: Numerics) -> DecoderWeights:
        spec, maps, device = self.spec, self.maps, numerics.device
        table = partial(rope_table, num_positions=self.num_positions, dtype=numerics.dtype)
        scales = query_scale_table(spec.rope, self.num_positions)
        embed = maps.embedding()
        positions, layer_embed = self.positions(), self.layer_embed()
        layers = [self.layer(i) for i in range(spec.num_layers)]
        final_norm, head_norm = self.final_norms()
        return DecoderWeights(
            embed.table,
            embed.lookup,
            positions,
            layer_embed,
            ropes=[table(rope, head_dim).to(device) for rope, head_dim in self.rope_specs],
            query_scales=None if scales is None else scales.to(device),
            layers=layers,
            final_norm=final_norm,
            head_norm=head_norm,
            head=maps.head(embed.table),
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
        of_hidden = maps.kernels.linear([maps.read(name).operand], None)
        weight = self.dense("layer_embed_norm").float() * 0.5**0.5
        # The map has a factor of hidden_size ** -0.5. Without it, the norm differs only by its epsilon.
        eps = spec.norm_eps * spec.hidden_size
        return LayerEmbedding(lookup, of_hidden, weight, spec.layer_embed_size, maps.kernels.norm, eps)

    def final_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The final norm, and that with the logit scale."""
        final_norm = self._norm("final_norm")
        if self.spec.logit_scale == 1.0:
            return final_norm, final_norm
        return final_norm, final_norm.float() * self.spec.logit_scale  # applied in float32, before the head

    def layer(self, index: int) -> Layer:
        """A layer."""
        spec, maps, prefix = self.spec, self.maps, f"layers.{index}."
        attn_norm, ffn_norm = (self._norm(prefix + n) if spec.pre_norms else None for n in ("attn_norm", "ffn_norm"))
        post_attn_norm, post_ffn_norm = (
            self._norm(prefix + n) if spec.post_norms else None for n in ("post_attn_norm", "post_ffn_norm")
        )
        mixer = self._mixer_of(index, prefix)
        feed_forward: Mlp | ExpertLayer
        if spec.experts is None or not spec.has_experts(index):
            feed_forward = Mlp(maps.linear(prefix, "gate_up"), maps.linear(prefix, "down"))
        else:
            feed_forward = maps.experts(prefix, spec.experts)
            if spec.dense_beside:
                assert post_ffn_norm is not None
                feed_forward = self._dense_beside(prefix, feed_forward, post_ffn_norm)
        own_input = self._layer_input(index, prefix) if spec.layer_embed_size else None
        factor = self.dense(f"{prefix}factor") if spec.layer_factors else None
        return Layer(attn_norm, post_attn_norm, mixer, ffn_norm, post_ffn_norm, feed_forward, own_input, factor)

    def _dense_beside(self, prefix: str, experts: ExpertLayer, post_norm: torch.Tensor) -> DenseBeside:
        gate_up, down = (self.maps.linear(prefix, name) for name in ("dense_gate_up", "dense_down"))
        before, of_dense, of_experts = (
            self._norm(prefix + name) for name in ("experts_norm", "post_dense_norm", "post_experts_norm")
        )
        kernels = self.maps.kernels
        norms = before, of_dense, of_experts, post_norm
        return DenseBeside(gate_up, down, experts, *norms, kernels.norm, kernels.zeros_like)

    def _layer_input(self, index: int, prefix: str) -> LayerInput:
        gate, out = (self.maps.whole(prefix, name) for name in ("layer_gate", "layer_out"))
        return LayerInput(index, gate, out, self._norm(f"{prefix}post_layer_norm"), self.maps.kernels.gate_by)

    def _mixer_of(self, index: int, prefix: str) -> Mixer:
        if self.spec.is_stateful(index):
            return self._mixer(index, prefix)
        if self.spec.latent is not None:
            return self._latent(index, prefix, self.spec.latent)
        return self._attention(index, prefix)

    def _latent(self, index: int, prefix: str, latent: LatentSpec) -> LatentMixer:
        spec, maps, has = self.spec, self.maps, self.spec.linears(index)
        kernels = maps.kernels.latent
        norms = {name: self.dense(prefix + name) for name in latent.parameters()}
        into, out = (maps.linear(prefix, name) for name in ("latent_in", "out"))
        into_kv, q_up = (maps.linear(prefix, n) if n in has else None for n in ("latent_kv", "latent_q"))
        return LatentMixer(
            kernels,
            spec.norm_eps,
            into,
            into_kv,
            q_up,
            out,
            self._from_latents(prefix, latent),
            q_norm=norms.get("q_a_norm"),
            kv_norm=norms["kv_a_norm"],
            latent_eps=latent.norm_eps,
            stored=latent.stored,
            head_dim=spec.head_dim,
            scale=spec.head_dim**-0.5 if spec.attn_scale is None else spec.attn_scale,
            interleaved=spec.rope.interleaved,
        )

    def _from_latents(self, prefix: str, latent: LatentSpec) -> Any:
        """The map from latents to keys and values, as the backend has it."""
        heads, kernels = self.spec.num_heads, self.maps.kernels.latent
        if latent.split_up:
            absorb, values = (self.maps.read(f"{prefix}{name}.weight").operand for name in ("k_b", "v_b"))
            return kernels.up_of_maps(absorb, values, heads)
        whole = self.dense(f"{prefix}kv_b.weight").view(heads, latent.expanded, latent.rank)
        return kernels.up(whole, latent.nope_dim)

    def _attention(self, index: int, prefix: str) -> AttentionMixer:
        spec, maps = self.spec, self.maps
        num_kv_heads, head_dim = spec.heads(index)
        parts: list[Heads] = ["q", "qk", "qkv"]
        heads = parts[len(spec.linears(index)["qkv"][0]) - 1] if not spec.fused_qkv else "qkv"
        q_norm = k_norm = None
        if spec.qk_norm and not spec.qk_norm_all_heads:
            q_norm = maps.turned(f"{prefix}q_norm")
            k_norm = q_norm if heads == "q" else maps.turned(f"{prefix}k_norm")
        qkv, out = (maps.linear(prefix, name) for name in ("qkv", "out"))
        attention = partial(
            maps.kernels.attention,
            scale=head_dim**-0.5 if spec.attn_scale is None else spec.attn_scale,
            window=spec.window if spec.is_sliding(index) and spec.window < self.num_positions else 0,
            soft_cap=spec.attn_soft_cap,
            sinks=self.dense(f"{prefix}sinks").float() if spec.sinks else None,
        )
        return AttentionMixer(
            maps.kernels,
            spec.norm_eps,
            qkv,
            out,
            num_heads=spec.num_heads + (len(heads) - 1) * num_kv_heads,
            head_dim=head_dim,
            gate_width=spec.num_heads * head_dim if spec.output_gate else 0,
            q_norm=q_norm,
            k_norm=k_norm,
            heads_norm=maps.heads_norm(prefix) if spec.qk_norm_all_heads else None,
            heads=heads,
            v_norm=spec.v_norm,
            rope=self.rope_specs.index(self._rope(index)),
            attention=attention,
        )

    def _mixer(self, index: int, prefix: str) -> Mixer:
        spec, maps = self.spec, self.maps
        own = {name: self.dense(prefix + name) for name in spec.mixer.parameters()} if spec.mixer else {}
        linears = {name: maps.linear(prefix, name) for name in spec.linears(index) if name.startswith("mix_")}
        into, out, conv = linears["mix_in"], linears["mix_out"], own["conv"].squeeze(1)
        if not isinstance(spec.mixer, DeltaRuleSpec):
            return ShortConvMixer(maps.kernels, spec.norm_eps, into, out, conv, own.get("conv_bias"))
        return DeltaRuleMixer(
            maps.kernels,
            spec.norm_eps,
            into,
            linears.get("mix_gates"),
            out,
            conv,
            decay_log=own["decay_log"].float(),
            decay_bias=own["decay_bias"].float(),
            mix_norm=own["mix_norm"],
            values=spec.mixer.values,
            tiled=spec.mixer.tiled,
        )

    def _rope(self, index: int) -> tuple[RopeSpec, int]:
        """A layer's rotary positions and the head_dim."""
        spec = self.spec
        return spec.rope_of(index), spec.heads(index).head_dim if spec.latent is None else spec.rope_head_dim

    def _norm(self, name: str) -> torch.Tensor:
        weight = self.dense(name)
        return weight if self.spec.norm == "rms" else torch.stack((weight, self.dense(f"{name}_bias")))
