"""The OLMo family: norms of q and k over all heads.

- OLMo 2 and 3 have norms after attention and the feed-forward layer but none before.
- In OLMo 3, three of four layers have a window, and only the others have a stretched RoPE.
- OLMoE has norms before them, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec, LayerSpec
from runtime.base.model.layer_spec import POST_NORMS
from runtime.base.types import CallboardError
from runtime.models.families import llama, qwen
from runtime.models.rope import ropes_by_kind
from runtime.models.weight_map import WeightMap

_HEADS_NORMS = {
    "q_heads_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_heads_norm": "model.layers.{}.self_attn.k_norm.weight",
}
WEIGHT_MAP = WeightMap({
    **llama.WEIGHT_MAP.names,
    **_HEADS_NORMS,
    "post_attn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "post_ffn_norm": "model.layers.{}.post_feedforward_layernorm.weight",
})  # fmt: skip
MOE_WEIGHT_MAP = WeightMap({**llama.WEIGHT_MAP.names, **qwen.EXPERT_NAMES, **_HEADS_NORMS})


def olmo2_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for what llama refuses."""
    layer = LayerSpec(llama.attention(config, qk_norm="all"), llama.ffn(config), POST_NORMS)
    return llama.decoder(config, [layer] * config["num_hidden_layers"])


def olmo3_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of an OLMo 3."""
    full, sliding = (llama.attention({**config, **rope}, qk_norm="all") for rope in ropes_by_kind(config))
    mixers, ffn = llama.attentions(config, full, lambda i: bool((i + 1) % 4), sliding), llama.ffn(config)
    return llama.decoder(config, [LayerSpec(mixer, ffn, POST_NORMS) for mixer in mixers])


def moe_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of an OLMoE; raises CallboardError if it clips q, k and v."""
    if config["clip_qkv"] is not None:
        raise CallboardError(f"The model's clip_qkv is {config['clip_qkv']!r}; only models without it are supported.")
    experts = ExpertsSpec(config["num_experts"], config["num_experts_per_tok"], config["norm_topk_prob"])
    layer = LayerSpec(llama.attention(config, qk_norm="all"), llama.ffn(config, experts=experts))
    return llama.decoder(config, [layer] * config["num_hidden_layers"])
