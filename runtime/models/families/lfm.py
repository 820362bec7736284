"""LFM2: a gated short convolution in most layers, attention with an RMSNorm on each head's q and k in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec, FfnSpec, LayerSpec
from runtime.base.model.mixer_spec import ShortConvSpec
from runtime.models.families import llama
from runtime.models.weight_map import WeightMap

_FFN = {"gate": "w1", "up": "w3", "down": "w2"}
_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.embedding_norm.weight",
    "head": "lm_head.weight",
    "attn_norm": "model.layers.{}.operator_norm.weight",
    "ffn_norm": "model.layers.{}.ffn_norm.weight",
    "q": "model.layers.{}.self_attn.q_proj",
    "k": "model.layers.{}.self_attn.k_proj",
    "v": "model.layers.{}.self_attn.v_proj",
    "out": "model.layers.{}.self_attn.out_proj",
    "q_norm": "model.layers.{}.self_attn.q_layernorm.weight",
    "k_norm": "model.layers.{}.self_attn.k_layernorm.weight",
    "mix_in": "model.layers.{}.conv.in_proj",
    "mix_out": "model.layers.{}.conv.out_proj",
    "conv": "model.layers.{}.conv.conv.weight",
    "conv_bias": "model.layers.{}.conv.conv.bias",
}
WEIGHT_MAP = WeightMap(_NAMES | {part: "model.layers.{}.feed_forward." + name for part, name in _FFN.items()})
IMAGE_TEXT_WEIGHT_MAP = WEIGHT_MAP.inside("model.language_model.")
MOE_WEIGHT_MAP = WeightMap(
    _NAMES
    | {"router": "model.layers.{}.feed_forward.gate", "choice_bias": "model.layers.{}.feed_forward.expert_bias"}
    | {part: "model.layers.{}.feed_forward.experts.{}." + name for part, name in _FFN.items()}
    | {f"dense.{part}": "model.layers.{}.feed_forward." + name for part, name in _FFN.items()}
)
_SUM_EPS = 1e-6  # added to the sum of a token's expert weights


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json."""
    return _decoder(config, [llama.ffn(config, size=_ffn_size(config))] * config["num_hidden_layers"])


def moe_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a model with experts."""
    experts = ExpertsSpec(
        config["num_experts"],
        config["num_experts_per_tok"],
        normalized=config["norm_topk_prob"],
        scores="sigmoid",
        choice_bias=config["use_expert_bias"],
        sum_eps=_SUM_EPS,
        scale=config["routed_scaling_factor"],
    )
    mixture = llama.ffn(config, size=config["moe_intermediate_size"], experts=experts)
    layers, num_dense = range(config["num_hidden_layers"]), config["num_dense_layers"]
    return _decoder(config, [llama.ffn(config) if i < num_dense else mixture for i in layers])


def _decoder(config: Mapping[str, Any], ffns: list[FfnSpec]) -> DecoderSpec:
    conv = ShortConvSpec(config["hidden_size"], config["conv_L_cache"], config["conv_bias"])
    attention, attending = llama.attention(config, qk_norm="head"), config["full_attn_idxs"]
    kinds = config["layer_types"] or [
        "full_attention" if attending is None or i in attending else "conv" for i in range(len(ffns))
    ]
    layers = [LayerSpec(conv if kinds[i] == "conv" else attention, ffn) for i, ffn in enumerate(ffns)]
    tied = config.get("tie_embedding", config["tie_word_embeddings"])
    return llama.decoder(config, layers, norm_eps=config["norm_eps"], tied_head=tied)


def _ffn_size(config: Mapping[str, Any]) -> int:
    """The size of feed-forward layers, which a config states before it is adjusted."""
    size = int(config.get("block_ff_dim", config["intermediate_size"]))
    if not config["block_auto_adjust_ff_dim"]:
        return size
    multiple = config["block_multiple_of"]
    return int(-(-int(config["block_ffn_dim_multiplier"] * int(2 * size / 3)) // multiple) * multiple)
