"""Seed-OSS: a Llama with biases on q, k and v, and an explicit width of heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.models.families import llama
from runtime.spec.decoder_spec import DecoderSpec

WEIGHT_MAP = llama.WEIGHT_MAP


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for what llama refuses."""
    spec = llama.decoder_spec({"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8, **config})
    return replace(spec, out_bias=config.get("attention_out_bias", False))
