"""The Qwen family.

- Qwen3 has an RMSNorm on each head's q and k; Qwen2 and Qwen2.5 have biases on q, k and v.
- Qwen3-MoE and Qwen2-MoE have experts. The latter has a shared one, of several times their size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec, FfnSpec, LayerSpec
from runtime.base.types import CallboardError
from runtime.models.families import llama
from runtime.models.weight_map import WeightMap

_QK_NORMS = {
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
}
EXPERT_NAMES = {
    "router": "model.layers.{}.mlp.gate",
    "gate": "model.layers.{}.mlp.experts.{}.gate_proj",
    "up": "model.layers.{}.mlp.experts.{}.up_proj",
    "down": "model.layers.{}.mlp.experts.{}.down_proj",
}
WEIGHT_MAP = WeightMap({**llama.WEIGHT_MAP.names, **_QK_NORMS})
IMAGE_TEXT_WEIGHT_MAP = WEIGHT_MAP.inside("model.language_model.")  # Qwen3-VL
SHARED_NAMES = {
    "shared_gate": "model.layers.{}.mlp.shared_expert_gate",
    "shared.gate": "model.layers.{}.mlp.shared_expert.gate_proj",
    "shared.up": "model.layers.{}.mlp.shared_expert.up_proj",
    "shared.down": "model.layers.{}.mlp.shared_expert.down_proj",
}
MOE_WEIGHT_MAP = WeightMap({**WEIGHT_MAP.names, **EXPERT_NAMES})
INTERNVL_WEIGHT_MAP = WeightMap(llama.WEIGHT_MAP.names, base="language_model.")
IMAGE_TEXT_MOE_WEIGHT_MAP = MOE_WEIGHT_MAP.inside("model.language_model.")
QWEN2_MOE_WEIGHT_MAP = WeightMap({**llama.WEIGHT_MAP.names, **EXPERT_NAMES, **SHARED_NAMES})


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a dense model's config.json; raises CallboardError for what llama refuses."""
    return _decoder(config, llama.ffn(config), config["max_window_layers"])


def moe_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Qwen3-MoE's config.json; raises CallboardError for one with dense layers among the others."""
    return _decoder(config, _mixture(config))


def internvl_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec for an InternVL's text part; raises CallboardError for another kind than Qwen2's."""
    if (kind := config.get("model_type") or "qwen2") not in ("qwen2", "internvl"):
        raise CallboardError(f"The model's text_config is of type {kind!r}; supported is qwen2.")
    return decoder_spec(config)


def image_text_moe_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec for a Qwen3-VL's text part with experts. Their weights always have the sum 1."""
    return moe_decoder_spec({**config, "norm_topk_prob": True})


def _decoder(config: Mapping[str, Any], ffn: FfnSpec, first_window: int = 0) -> DecoderSpec:
    is_qwen2 = config["architectures"][0] in ("Qwen2ForCausalLM", "InternVLForConditionalGeneration")
    own = {"qkv_bias": True, "out_bias": False} if is_qwen2 else {"qk_norm": "head"}
    windows = {**config, "sliding_window": config["use_sliding_window"] and config["sliding_window"]}
    mixers = llama.attentions(windows, llama.attention(config, **own), lambda i: i >= first_window)
    return llama.decoder(config, [LayerSpec(mixer, ffn) for mixer in mixers])


def qwen2_moe_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec for a Qwen2-MoE's config.json; raises CallboardError as for Qwen3-MoE, and for windows.

    The shared expert counts as several experts. Raises CallboardError if its size is not a multiple of theirs."""
    if config["use_sliding_window"]:
        raise CallboardError("The model's use_sliding_window is true; of Qwen2-MoE, only full attention is supported.")
    size, shared = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
    if shared % size:
        raise CallboardError(
            f"The model's shared_expert_intermediate_size is {shared}, which must be a multiple of its "
            f"moe_intermediate_size, {size}."
        )
    attention = llama.attention(config, qkv_bias=config["qkv_bias"], out_bias=False)
    layer = LayerSpec(attention, _mixture(config, shared=shared // size, shared_gate=True))
    return llama.decoder(config, [layer] * config["num_hidden_layers"])


def _mixture(config: Mapping[str, Any], **shared: Any) -> FfnSpec:
    if config["mlp_only_layers"] or config["decoder_sparse_step"] != 1:
        raise CallboardError("The model has dense layers between those of experts; only experts in all are supported.")
    experts = ExpertsSpec(config["num_experts"], config["num_experts_per_tok"], config["norm_topk_prob"], **shared)
    return llama.ffn(config, size=config["moe_intermediate_size"], experts=experts)
