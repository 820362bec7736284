"""Qwen's hybrids: Qwen3-Next, and the text parts of Qwen3.5, 3.6 and 3.8.

Most layers have the gated delta rule, and the others attention:

- its output has a gate;
- each head's q and k have an RMSNorm;
- rotary positions turn a quarter of each head.

Norms multiply by 1 + w."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec
from runtime.base.model.mixer_spec import DeltaRuleSpec
from runtime.base.types import CallboardError
from runtime.models.families import llama
from runtime.models.weight_map import WeightMap

_BASE = "model.language_model."  # the place of the text part in a model with images
_IGNORED = r"(model\.)?visual\..*|mtp\..*"  # images, and layers that draft tokens
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
    """The spec of a config.json, or of its text part."""
    return _spec(config)


def moe_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a model with experts."""
    return _with_experts(config, _spec(config), True)


def next_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Qwen3-Next; raises CallboardError for one with dense layers among the others."""
    if config["mlp_only_layers"] or config["decoder_sparse_step"] != 1:
        raise CallboardError("The model has dense layers between those of experts; only experts in all are supported.")
    spec = _spec(config)
    assert isinstance(spec.mixer, DeltaRuleSpec)
    spec = replace(spec, mixer=replace(spec.mixer, by_key_head=config.get("linear_maps_by_key_head", True)))
    return _with_experts(config, spec, config["norm_topk_prob"])


def _spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec without experts."""
    if not config.get("attn_output_gate", True):
        raise CallboardError("The model's attn_output_gate is false; only attention with a gate is supported.")
    spec = llama.decoder_spec(config)
    every = config["full_attention_interval"]
    kinds = config["layer_types"] or [
        "linear_attention" if (i + 1) % every else "full_attention" for i in range(spec.num_layers)
    ]
    mixer = DeltaRuleSpec(
        key_heads=config["linear_num_key_heads"],
        value_heads=config["linear_num_value_heads"],
        key_dim=config["linear_key_head_dim"],
        value_dim=config["linear_value_head_dim"],
        width=config["linear_conv_kernel_dim"],
        tiled=config.get("linear_heads_tiled", False),  # in a GGUF file
    )
    if mixer.value_heads % mixer.key_heads:
        raise CallboardError(
            f"The model's linear_num_value_heads is {mixer.value_heads}, which is not a multiple of its "
            f"linear_num_key_heads, {mixer.key_heads}."
        )
    stateful = tuple(kind == "linear_attention" for kind in kinds[: spec.num_layers])
    return replace(spec, qk_norm=True, output_gate=True, mixer=mixer, stateful=stateful)


def _with_experts(config: Mapping[str, Any], spec: DecoderSpec, normalized: bool) -> DecoderSpec:
    """The spec with experts, and one more for all tokens; raises CallboardError if that one has another size."""
    size, shared = config["moe_intermediate_size"], config["shared_expert_intermediate_size"]
    if shared != size:
        raise CallboardError(
            f"The model's shared_expert_intermediate_size is {shared} and its moe_intermediate_size {size}; only equal "
            "sizes are supported."
        )
    experts = ExpertsSpec(config["num_experts"], config["num_experts_per_tok"], normalized, shared=1, shared_gate=True)
    return replace(spec, ffn_size=size, experts=experts)
