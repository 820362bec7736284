"""The DeepSeek family, V2 and V3, and GLM-4.7-Flash: attention over latents, and a mixture with shared experts
after the first layers.

Rotary positions turn pairs of neighbours. With yarn, attention scores grow by the square of a factor that follows from
`mscale_all_dim`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec, LayerSpec
from runtime.base.model.latent_spec import LatentSpec
from runtime.base.types import CallboardError
from runtime.models.families import glm, llama
from runtime.models.rope import rope_parameters, rope_spec
from runtime.models.weight_map import WeightMap

_ATTENTION = {
    "q_a": "model.layers.{}.self_attn.q_a_proj",
    "q_a_norm": "model.layers.{}.self_attn.q_a_layernorm.weight",
    "q_b": "model.layers.{}.self_attn.q_b_proj",
    "kv_a": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "model.layers.{}.self_attn.kv_a_layernorm.weight",
    "kv_b": "model.layers.{}.self_attn.kv_b_proj",
    "k_b": "model.layers.{}.self_attn.k_b_proj",  # both in GGUF files
    "v_b": "model.layers.{}.self_attn.v_b_proj",
}
WEIGHT_MAP = WeightMap({**llama.WEIGHT_MAP.names, **_ATTENTION, **glm.EXPERT_NAMES})


def v2_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a DeepSeek-V2's config.json. Raises CallboardError for a router that is not supported."""
    method, n_group = config["topk_method"], config["n_group"] or 1
    if config["norm_topk_prob"] or config.get("scoring_func", "softmax") != "softmax":
        raise CallboardError(
            "The model's router has norm_topk_prob or a scoring_func other than softmax; for DeepSeek-V2, only weights "
            "of a softmax that are not normalized are supported."
        )
    if method not in ("greedy", "group_limited_greedy"):
        raise CallboardError(f"The model's topk_method is {method!r}; supported are greedy and group_limited_greedy.")
    has_groups = method != "greedy"
    experts = replace(
        glm.experts(config),
        normalized=False,
        scores="softmax",
        choice_bias=False,
        groups=n_group if has_groups else 1,
        top_groups=(config["topk_group"] or 1) if has_groups else 1,
        group_score="max",
    )
    return _decoder(config, experts)


def v3_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of the config.json of a DeepSeek-V3 or -R1, or of a GLM-4.7-Flash. Raises CallboardError for a router
    that is not supported."""
    method, scores = config.get("topk_method", "noaux_tc"), config.get("scoring_func", "sigmoid")
    if method != "noaux_tc" or scores != "sigmoid":
        raise CallboardError(
            f"The model's router has the topk_method {method!r} and the scoring_func {scores!r}; supported are "
            "noaux_tc and sigmoid."
        )
    return _decoder(config)


def flash_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a GLM-4.7-Flash's config.json."""
    kinds = config["mlp_layer_types"] or ["dense"]
    dense = kinds[: config["num_hidden_layers"]].count("dense")
    if "dense" in kinds[dense : config["num_hidden_layers"]]:
        raise CallboardError("The model has dense layers between those of experts; only the first layers may be dense.")
    return v3_decoder_spec({**config, "first_k_dense_replace": dense})


def _decoder(config: Mapping[str, Any], experts: ExpertsSpec | None = None) -> DecoderSpec:
    if config.get("moe_layer_freq", 1) != 1:
        raise CallboardError(
            f"The model's moe_layer_freq is {config['moe_layer_freq']}; only 1, experts in all layers after the first "
            "ones, is supported."
        )
    attention, ffns = _attention(config), [llama.ffn(config)] * config["num_hidden_layers"]
    if config["n_routed_experts"] and config["first_k_dense_replace"] < len(ffns):
        ffns = glm.ffns(config, experts or glm.experts(config))
    return llama.decoder(config, [LayerSpec(attention, ffn) for ffn in ffns])


def _attention(config: Mapping[str, Any]) -> LatentSpec:
    if config["attention_bias"] or config["mlp_bias"]:
        raise CallboardError("The model's config.json has attention_bias or mlp_bias; latent attention has no biases.")
    rope, scaling = rope_spec(config), rope_parameters(config)
    factor = 0.1 * (scaling.get("mscale_all_dim") or 0.0) * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    latent = LatentSpec(
        num_heads=config["num_attention_heads"],
        rank=config["kv_lora_rank"],
        rope_dim=config["qk_rope_head_dim"],
        nope_dim=config["qk_nope_head_dim"],
        value_dim=config["v_head_dim"],
        q_rank=config["q_lora_rank"] or 0,
        split_up=config.get("kv_b_is_split", False),
        rope=replace(rope, interleaved=bool(config.get("rope_interleave", True))),
    )
    if latent.rope_dim % 2:
        raise CallboardError(f"The model's qk_rope_head_dim is {latent.rope_dim}; it must be even.")
    if rope.partial != 1.0:
        raise CallboardError(
            f"The model's partial_rotary_factor is {rope.partial}; with latent attention, qk_rope_head_dim states the "
            "numbers that rotate."
        )
    return replace(latent, scale=latent.head_dim**-0.5 * (factor if rope.type != "default" else 1.0) ** 2)
