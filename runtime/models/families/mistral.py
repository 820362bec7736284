"""The Mistral family: variants of Llama.

- Mistral 7B: the first version attends in a sliding window.
- Ministral 8B: some layers attend in a sliding window.
- Ministral 3: queries grow with their position.
- Models with images: their text part.
- Mixtral: experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.base.model.decoder_spec import AttentionSpec, DecoderSpec, ExpertsSpec, FfnSpec, LayerSpec
from runtime.base.types import CallboardError
from runtime.models.families import llama
from runtime.models.rope import rope_parameters, rope_spec
from runtime.models.weight_map import WeightMap

WEIGHT_MAP = llama.WEIGHT_MAP
IMAGE_TEXT_WEIGHT_MAP = WeightMap(llama.WEIGHT_MAP.names, base="language_model.")
MOE_WEIGHT_MAP = WeightMap({
    **WEIGHT_MAP.names,
    "router": "model.layers.{}.block_sparse_moe.gate",
    "gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
    "up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
    "down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
})  # fmt: skip


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for what llama refuses."""
    return windowed(config, llama.attention(config), llama.ffn(config))


def windowed(config: Mapping[str, Any], attention: AttentionSpec, ffn: FfnSpec) -> DecoderSpec:
    """A decoder in which all layers have the config's window, unless it states their kinds."""
    mixers = llama.attentions(config, attention, lambda i: True)
    return llama.decoder(config, [LayerSpec(mixer, ffn) for mixer in mixers])


def ministral3_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Ministral 3's config.json."""
    rope, stated = rope_spec(config), rope_parameters(config)
    if beta := stated.get("llama_4_scaling_beta"):
        original = int(stated["original_max_position_embeddings"])
        rope = replace(rope, query_beta=float(beta), original_positions=original)
    return windowed(config, llama.attention(config, rope=rope), llama.ffn(config))


def image_text_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec for a config.json's text part; raises CallboardError for another kind of text part."""
    kind = config.get("model_type") or "mistral"
    if kind not in _TEXT_SPECS:
        raise CallboardError(f"The model's text_config is of type {kind!r}; supported are mistral and ministral3.")
    return _TEXT_SPECS[kind](config)


def moe_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Mixtral's config.json."""
    experts = ExpertsSpec(config["num_local_experts"], config["num_experts_per_tok"], normalized=True)
    return windowed(config, llama.attention(config), llama.ffn(config, experts=experts))


# key: model_type in a text_config, or the model's own if there is none
_TEXT_SPECS = {"mistral": decoder_spec, "ministral3": ministral3_spec, "mistral3": decoder_spec}
