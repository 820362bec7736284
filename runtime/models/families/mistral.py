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

from runtime.models.families import llama
from runtime.models.weight_map import WeightMap
from runtime.spec.decoder_spec import DecoderSpec, ExpertsSpec
from runtime.spec.types import CallboardError

WEIGHT_MAP = llama.WEIGHT_MAP
IMAGE_TEXT_WEIGHT_MAP = WeightMap(
    llama.WEIGHT_MAP.names, base="language_model.", ignored=r"(vision_tower|multi_modal_projector)\..*"
)
MOE_WEIGHT_MAP = WeightMap({
    **WEIGHT_MAP.names,
    "router": "model.layers.{}.block_sparse_moe.gate",
    "gate": "model.layers.{}.block_sparse_moe.experts.{}.w1",
    "up": "model.layers.{}.block_sparse_moe.experts.{}.w3",
    "down": "model.layers.{}.block_sparse_moe.experts.{}.w2",
})  # fmt: skip

# Defaults that configs leave out.
_MINISTRAL_3: dict[str, Any] = {
    "vocab_size": 131072, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-05,
}  # fmt: skip
_MISTRAL_SMALL: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05, "rope_theta": 1e9,
}  # fmt: skip


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for what llama refuses."""
    spec = llama.decoder_spec(config)
    if not (window := config.get("sliding_window")):
        return spec
    types = config.get("layer_types") or ["sliding_attention"] * spec.num_layers
    return replace(spec, window=window, sliding=tuple(kind == "sliding_attention" for kind in types))


def ministral3_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Ministral 3's config.json."""
    spec = decoder_spec({**_MINISTRAL_3, **config})
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not (beta := rope.get("llama_4_scaling_beta")):
        return spec
    original = int(rope["original_max_position_embeddings"])
    return replace(spec, rope=replace(spec.rope, query_beta=float(beta), original_positions=original))


def image_text_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of the text part of a config.json; raises CallboardError for a text part of another kind."""
    text = {"tie_word_embeddings": config.get("tie_word_embeddings", False), **config.get("text_config", config)}
    kind = text.get("model_type", "mistral")
    if kind not in _TEXT_SPECS:
        raise CallboardError(f"The model's text_config is of type {kind!r}; supported are {', '.join(_TEXT_SPECS)}.")
    return _TEXT_SPECS[kind](_MISTRAL_SMALL | text if kind == "mistral" else text)


def moe_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Mixtral's config.json."""
    experts = ExpertsSpec(config["num_local_experts"], config["num_experts_per_tok"], normalized=True)
    return replace(decoder_spec(config), experts=experts)


_TEXT_SPECS = {"mistral": decoder_spec, "ministral3": ministral3_spec}  # by the model_type of a text_config
