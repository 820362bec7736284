"""Qwen's hybrids: Qwen3-Next, and the text parts of Qwen3.5, 3.6 and 3.8.

Most layers have the gated delta rule, and the others attention:

- its output has a gate;
- each head's q and k have an RMSNorm;
- rotary positions turn a quarter of each head.

Norms multiply by 1 + w."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec, FfnSpec, LayerSpec
from runtime.base.model.mixer_spec import DeltaRuleSpec
from runtime.base.types import CallboardError
from runtime.models.families import llama
from runtime.models.weight_map import WeightMap

_BASE = "model.language_model."  # the text part's place in a model with images
_IGNORED = r"mtp\..*"  # layers that draft tokens
_LAYER = {
    **{part: name.removeprefix("model.") for part, name in llama.WEIGHT_MAP.names.items() if part != "q"},
    "gated_q": "layers.{}.self_attn.q_proj",
    "q_norm": "layers.{}.self_attn.q_norm.weight",
    "k_norm": "layers.{}.self_attn.k_norm.weight",
    "mix_out": "layers.{}.linear_attn.out_proj",
    "conv": "layers.{}.linear_attn.conv1d.weight",
    "decay_log": "layers.{}.linear_attn.A_log",
    "decay_bias": "layers.{}.linear_attn.dt_bias",
    "mix_norm": "layers.{}.linear_attn.norm.weight",
}
_NAMES = _LAYER | {f"mix_{part}": "layers.{}.linear_attn.in_proj_" + part for part in ("qkv", "z", "b", "a")}
_EXPERTS = {
    "router": "layers.{}.mlp.gate",
    "shared_gate": "layers.{}.mlp.shared_expert_gate",
    **{part: "layers.{}.mlp.experts.{}." + part + "_proj" for part in ("gate", "up", "down")},
    **{f"shared.{part}": "layers.{}.mlp.shared_expert." + part + "_proj" for part in ("gate", "up", "down")},
}
WEIGHT_MAP = WeightMap(_NAMES, _BASE, norms_plus_one=True, ignored=_IGNORED)
MOE_WEIGHT_MAP = WeightMap(_NAMES | _EXPERTS, _BASE, norms_plus_one=True, ignored=_IGNORED)
NEXT_WEIGHT_MAP = WeightMap(
    _NAMES | {f"mix_{part}": "layers.{}.linear_attn.in_proj_" + part for part in ("qkvz", "ba")} | _EXPERTS,
    "model.",
    norms_plus_one=True,
    ignored=_IGNORED,
)


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec for a config.json, or for its text part."""
    return _decoder(config, llama.ffn(config))


def moe_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a model with experts."""
    return _decoder(config, _mixture(config, True))


def next_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Qwen3-Next; raises CallboardError for one with dense layers among the others."""
    if config["mlp_only_layers"] or config["decoder_sparse_step"] != 1:
        raise CallboardError("The model has dense layers between those of experts; only experts in all are supported.")
    by_key_head = config.get("linear_maps_by_key_head", True)
    return _decoder(config, _mixture(config, config["norm_topk_prob"]), by_key_head)


def _decoder(config: Mapping[str, Any], ffn: FfnSpec, by_key_head: bool = False) -> DecoderSpec:
    if not config.get("attn_output_gate", True):
        raise CallboardError("The model's attn_output_gate is false; only attention with a gate is supported.")
    delta_rule = DeltaRuleSpec(
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        width=config["linear_conv_kernel_dim"],
        by_key_head=by_key_head,
        tiled=config.get("linear_heads_tiled", False),  # set for a GGUF file
    )
    if delta_rule.value_heads % delta_rule.key_heads:
        raise CallboardError(
            f"The model's linear_num_value_heads is {delta_rule.value_heads}, which is not a multiple of its "
            f"linear_num_key_heads, {delta_rule.key_heads}."
        )
    attention = llama.attention(config, qk_norm="head", output_gate=True)
    layers, every = range(config["num_hidden_layers"]), config["full_attention_interval"]
    kinds = config["layer_types"] or ["linear_attention" if (i + 1) % every else "full_attention" for i in layers]
    mixers = (delta_rule if kinds[i] == "linear_attention" else attention for i in layers)
    return llama.decoder(config, [LayerSpec(mixer, ffn) for mixer in mixers])


def _mixture(config: Mapping[str, Any], normalized: bool) -> FfnSpec:
    """Experts, and one more for all tokens; raises CallboardError if that one has another size."""
    size, shared = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
    if shared != size:
        raise CallboardError(
            f"The model's shared_expert_intermediate_size is {shared} and its moe_intermediate_size {size}; only equal "
            "sizes are supported."
        )
    experts = ExpertsSpec(config["num_experts"], config["num_experts_per_tok"], normalized, shared=1, shared_gate=True)
    return llama.ffn(config, size=size, experts=experts)
