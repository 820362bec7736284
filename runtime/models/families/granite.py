"""Granite 3 and the dense models of Granite 4: a Llama with four multipliers, and in some models with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec, FfnSpec, LayerSpec, RopeSpec
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
    """The spec of a config.json; raises CallboardError for what llama refuses."""
    return _decoder(config, llama.ffn(config))


def moe_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a model with experts."""
    experts = ExpertsSpec(
        config["num_local_experts"], config["num_experts_per_tok"], normalized=False, scores="softmax_of_chosen"
    )
    return _decoder(config, llama.ffn(config, experts=experts))


def hybrid_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Granite 4's config.json; raises CallboardError for one with state-space layers or experts."""
    others = set(config["layer_types"] or ["linear_attention"]) - {"attention", "full_attention"}
    if others or config["num_local_experts"]:
        raise CallboardError(
            f"The model has {config['num_local_experts']} experts and layers of kind {sorted(others)} "
            "(layer_types); of Granite 4, models of attention layers without experts are supported."
        )
    ffn = llama.ffn(config, size=config["shared_intermediate_size"], fused_gate_up=True)
    return _decoder(
        config, ffn, **{} if config["position_embedding_type"] == "rope" else {"rope": RopeSpec(partial=0.0)}
    )


def _decoder(config: Mapping[str, Any], ffn: FfnSpec, **of_attention: Any) -> DecoderSpec:
    """Granite multiplies the output of each layer before it is added to the residual.

    Here the residual is divided by the multiplier instead, so layers add their outputs as they are. So embeddings are
    divided by the multiplier, and the epsilon of norms by its square."""
    multiplier = config["residual_multiplier"]
    attention = llama.attention(config, scale=float(config["attention_multiplier"]), **of_attention)
    return llama.decoder(
        config,
        [LayerSpec(attention, ffn)] * config["num_hidden_layers"],
        norm_eps=config["rms_norm_eps"] / multiplier**2,
        embed_scale=config["embedding_multiplier"] / multiplier,
        logit_scale=1.0 / config["logits_scaling"],
    )
