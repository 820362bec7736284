"""Granite 3 and the dense models of Granite 4: a Llama with four multipliers, and in some models with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec, RopeSpec
from runtime.base.types import CallboardError
from runtime.models.families import llama
from runtime.models.weight_map import WeightMap

WEIGHT_MAP = llama.WEIGHT_MAP
HYBRID_WEIGHT_MAP = WeightMap({
    **llama.WEIGHT_MAP.names,
    "gate_up": "model.layers.{}.shared_mlp.input_linear",
    "down": "model.layers.{}.shared_mlp.output_linear",
})  # fmt: skip
MOE_WEIGHT_MAP = WeightMap({
    **llama.WEIGHT_MAP.names,
    "router": "model.layers.{}.block_sparse_moe.router.layer",
    "gate": "model.layers.{}.block_sparse_moe.experts.{}.gate_proj",
    "up": "model.layers.{}.block_sparse_moe.experts.{}.up_proj",
    "down": "model.layers.{}.block_sparse_moe.experts.{}.down_proj",
})  # fmt: skip


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for what llama refuses.

    Granite multiplies the output of each layer before it is added to the residual. Here the residual is divided by the
    multiplier instead, so layers add their outputs as they are. So embeddings are divided by the multiplier, and the
    epsilon of norms by its square."""
    spec, multiplier = llama.decoder_spec(config), config["residual_multiplier"]
    return replace(
        spec,
        norm_eps=spec.norm_eps / multiplier**2,
        embed_scale=config["embedding_multiplier"] / multiplier,
        attn_scale=float(config["attention_multiplier"]),
        logit_scale=1.0 / config["logits_scaling"],
    )


def moe_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a model with experts."""
    experts = ExpertsSpec(
        config["num_local_experts"], config["num_experts_per_tok"], normalized=False, scores="softmax_of_chosen"
    )
    return replace(decoder_spec(config), experts=experts)


def hybrid_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Granite 4's config.json; raises CallboardError for one with state-space layers or experts."""
    others = set(config["layer_types"] or ["linear_attention"]) - {"attention", "full_attention"}
    if others or config["num_local_experts"]:
        raise CallboardError(
            f"The model has {config['num_local_experts']} experts and layers of kind {sorted(others)} "
            "(layer_types); of Granite 4, models of attention layers without experts are supported."
        )
    spec = decoder_spec(dict(config, intermediate_size=config["shared_intermediate_size"]))
    rope = spec.rope if config["position_embedding_type"] == "rope" else RopeSpec(partial=0.0)
    return replace(spec, rope=rope, fused_gate_up=True)
