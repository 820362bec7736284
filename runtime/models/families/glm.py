"""The GLM-4 family. Rotary positions turn half a head.

- Dense models: rotary neighbour pairs, biases on q, k and v, gate and up as one. Glm4ForCausalLM (GLM-4-0414) also
  has norms after attention and after the feed-forward layer.
- GLM-4.5 to 4.7: mixtures after the first layers.
- GLM-4.1V and 4.5V: their texts, with rotary positions in sections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec, FfnSpec, LayerSpec
from runtime.base.model.layer_spec import POST_NORMS, PRE_NORMS
from runtime.models.families import llama
from runtime.models.rope import rope_spec
from runtime.models.weight_map import WeightMap

WEIGHT_MAP = WeightMap({**llama.WEIGHT_MAP.names, "gate_up": "model.layers.{}.mlp.gate_up_proj"})
POST_NORMS_WEIGHT_MAP = WeightMap({
    **WEIGHT_MAP.names,
    "post_attn_norm": "model.layers.{}.post_self_attn_layernorm.weight",
    "post_ffn_norm": "model.layers.{}.post_mlp_layernorm.weight",
})  # fmt: skip
_PROJECTIONS = {part: f"{part}_proj" for part in ("gate", "up", "down")}
EXPERT_NAMES = {  # names in a mixture with shared experts and a choice bias
    "router": "model.layers.{}.mlp.gate",
    "choice_bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
    **{part: "model.layers.{}.mlp.experts.{}." + name for part, name in _PROJECTIONS.items()},
    **{f"shared.{part}": "model.layers.{}.mlp.shared_experts." + name for part, name in _PROJECTIONS.items()},
    **{f"dense.{part}": "model.layers.{}.mlp." + name for part, name in _PROJECTIONS.items()},
}
MOE_WEIGHT_MAP = WeightMap({
    **llama.WEIGHT_MAP.names,
    **EXPERT_NAMES,
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
})  # fmt: skip
POST_NORMS_IMAGE_TEXT_WEIGHT_MAP = POST_NORMS_WEIGHT_MAP.inside("model.language_model.")
MOE_IMAGE_TEXT_WEIGHT_MAP = MOE_WEIGHT_MAP.inside("model.language_model.")
_SUM_EPS = 1e-20  # added to the sum of a token's expert weights


def decoder_spec(config: Mapping[str, Any], norms: tuple[str, ...] = PRE_NORMS) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for what llama refuses."""
    rope = replace(rope_spec(config), interleaved=config.get("rope_interleave", True))  # false in some GGUF files
    attention = llama.attention(config, out_bias=False, rope=rope)
    layer = LayerSpec(attention, llama.ffn(config, fused_gate_up=True), norms)
    return llama.decoder(config, [layer] * config["num_hidden_layers"])


def post_norms_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Glm4ForCausalLM."""
    return decoder_spec(config, PRE_NORMS + POST_NORMS)


def moe_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Glm4MoeForCausalLM; raises CallboardError for what llama refuses."""
    attention = llama.attention(config, out_bias=False, qk_norm="head" if config["use_qk_norm"] else "none")
    return llama.decoder(config, [LayerSpec(attention, ffn) for ffn in ffns(config, experts(config))])


def ffns(config: Mapping[str, Any], mixture: ExpertsSpec) -> list[FfnSpec]:
    """The feed-forward part of each layer: a mixture after the first layers."""
    size, num_dense = config["moe_intermediate_size"], config["first_k_dense_replace"]
    dense, experts = llama.ffn(config), llama.ffn(config, size=size, experts=mixture)
    return [dense if i < num_dense else experts for i in range(config["num_hidden_layers"])]


def experts(config: Mapping[str, Any]) -> ExpertsSpec:
    """A mixture with sigmoid scores, a choice bias, and groups of experts."""
    return ExpertsSpec(
        config["n_routed_experts"],
        config["num_experts_per_tok"],
        normalized=bool(config["norm_topk_prob"]),
        shared=config["n_shared_experts"],
        scores="sigmoid",
        choice_bias=True,
        sum_eps=_SUM_EPS,
        scale=config["routed_scaling_factor"],
        groups=config["n_group"] or 1,
        top_groups=config["topk_group"] or 1,
        group_score="top2",
        float32_logits=True,
    )
