"""Seed-OSS: a Llama with biases on q, k and v, and an explicit width of heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.models.families import llama

WEIGHT_MAP = llama.WEIGHT_MAP


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for what llama refuses."""
    return replace(llama.decoder_spec(config), out_bias=config["attention_out_bias"])
