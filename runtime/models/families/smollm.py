"""SmolLM3: a Llama without rotary positions in every fourth layer (arXiv 2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.models.families import llama

WEIGHT_MAP = llama.WEIGHT_MAP


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for what llama refuses."""
    spec = llama.decoder_spec(config)
    layers, interval = range(spec.num_layers), config["no_rope_layer_interval"]
    turned = config["no_rope_layers"] or [
        (i + 1) % interval for i in layers
    ]  # in spite of its name, 1 is a layer with rope
    spec = replace(spec, no_rope=tuple(not turned[i] for i in layers))
    if not (config["use_sliding_window"] and config["sliding_window"]):
        return spec
    types = config["layer_types"] or ["sliding_attention" if bare else "full_attention" for bare in spec.no_rope]
    return replace(spec, window=config["sliding_window"], sliding=tuple(t == "sliding_attention" for t in types))
