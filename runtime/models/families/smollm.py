"""SmolLM3: a Llama without rotary positions in every fourth layer (arXiv 2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec, LayerSpec, RopeSpec
from runtime.models.families import llama

WEIGHT_MAP = llama.WEIGHT_MAP


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for what llama refuses."""
    layers, interval = range(config["num_hidden_layers"]), config["no_rope_layer_interval"]
    # 1 is a layer with rope, in spite of the name
    turned = config["no_rope_layers"] or [(i + 1) % interval for i in layers]
    window = config["use_sliding_window"] and config["sliding_window"]
    attention, ffn = llama.attention(config), llama.ffn(config)
    mixers = llama.attentions({**config, "sliding_window": window}, attention, lambda i: not turned[i])
    bare = RopeSpec(partial=0.0)
    mixers = [mixer if turned[i] else replace(mixer, rope=bare) for i, mixer in enumerate(mixers)]
    return llama.decoder(config, [LayerSpec(mixer, ffn) for mixer in mixers])
