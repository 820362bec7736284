"""gpt-oss: mixtures with biases and a clamped activation, attention sinks, and windows in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.base.model.decoder_spec import ACTIVATION_LIMIT, DecoderSpec, ExpertsSpec, LayerSpec
from runtime.base.types import CallboardError
from runtime.models.families import llama
from runtime.models.weight_map import WeightMap

WEIGHT_MAP = WeightMap(
    {
        **llama.WEIGHT_MAP.names,
        "sinks": "model.layers.{}.self_attn.sinks",
        "router": "model.layers.{}.mlp.router",
        "gate": "model.layers.{}.mlp.experts.{}.gate_proj",
        "up": "model.layers.{}.mlp.experts.{}.up_proj",
        "down": "model.layers.{}.mlp.experts.{}.down_proj",
    },
    experts_in_turn=True,
)
_ALPHA = 1.702  # of the activation's sigmoid


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for an activation with another factor."""
    if (alpha := config["swiglu_alpha"]) != _ALPHA:
        raise CallboardError(f"The model's swiglu_alpha is {alpha!r}; supported is {_ALPHA}.")
    if (limit := float(config["swiglu_limit"])) != ACTIVATION_LIMIT:
        raise CallboardError(f"The model's activation is clamped to {limit}; only {ACTIVATION_LIMIT} is supported.")
    experts = ExpertsSpec(
        config["num_local_experts"],
        config["num_experts_per_tok"],
        normalized=False,
        scores="softmax_of_chosen",
        router_bias=True,
    )
    ffn = llama.ffn(config, experts=experts, activation="swiglu_clamped", ffn_bias=True)
    mixers = llama.attentions(config, llama.attention(config, sinks=True), lambda i: i % 2 == 0)
    return llama.decoder(config, [LayerSpec(mixer, ffn) for mixer in mixers])
