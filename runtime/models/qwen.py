"""The dense Qwen family: Qwen3 (an RMSNorm on each head's q and k), Qwen2 and Qwen2.5 (biases on q, k and v)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.core.types import CallboardError
from runtime.models import llama
from runtime.models.spec import DecoderSpec

NAMES = llama.NAMES | {
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
}


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for what llama refuses, and for sliding windows."""
    if config.get("use_sliding_window"):
        raise CallboardError("The model's use_sliding_window is true; only full attention is supported.")
    spec = llama.decoder_spec(config)
    if config["architectures"] == ["Qwen3ForCausalLM"]:
        return replace(spec, qk_norm=True, head_dim=config.get("head_dim", 128))
    return replace(spec, qkv_bias=True, out_bias=False)
