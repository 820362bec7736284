"""gpt-oss: mixtures with biases and a clamped activation, attention sinks, and windows in every other layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec
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
    spec, window = llama.decoder_spec(config), config["sliding_window"]
    kinds = config["layer_types"] or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(spec.num_layers)
    ]
    sliding = tuple(kind == "sliding_attention" for kind in kinds[: spec.num_layers])
    return replace(
        spec,
        experts=ExpertsSpec(
            config["num_local_experts"],
            config["num_experts_per_tok"],
            normalized=False,
            scores="softmax_of_chosen",
            router_bias=True,
        ),
        ffn_bias=True,
        activation="swiglu_clamped",
        activation_limit=float(config["swiglu_limit"]),
        sinks=True,
        window=window or 0,
        sliding=sliding if window else (),
    )
