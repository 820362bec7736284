"""Seed-OSS: a Llama with biases on q, k and v, and an explicit width of heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec, LayerSpec
from runtime.models.families import llama

WEIGHT_MAP = llama.WEIGHT_MAP


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for what llama refuses."""
    layer = LayerSpec(llama.attention(config, out_bias=config["attention_out_bias"]), llama.ffn(config))
    return llama.decoder(config, [layer] * config["num_hidden_layers"])
