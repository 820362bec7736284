"""LFM2: a gated short convolution in most layers, attention with an RMSNorm on each head's q and k in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.models.families import llama
from runtime.models.weight_map import WeightMap
from runtime.spec.decoder_spec import DecoderSpec, ExpertsSpec
from runtime.spec.mixer_spec import ShortConvSpec

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
MOE_WEIGHT_MAP = WeightMap(
    _NAMES
    | {"router": "model.layers.{}.feed_forward.gate", "choice_bias": "model.layers.{}.feed_forward.expert_bias"}
    | {part: "model.layers.{}.feed_forward.experts.{}." + name for part, name in _FFN.items()}
    | {f"dense.{part}": "model.layers.{}.feed_forward." + name for part, name in _FFN.items()}
)
_SUM_EPS = 1e-6  # of the weights of a token's experts


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json."""
    return _spec(config, _ffn_size(config))


def moe_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a model with experts."""
    experts = ExpertsSpec(
        config["num_experts"],
        config["num_experts_per_tok"],
        normalized=config.get("norm_topk_prob", True),
        scores="sigmoid",
        choice_bias=config.get("use_expert_bias", True),
        sum_eps=_SUM_EPS,
        scale=config.get("routed_scaling_factor", 1.0),
    )
    return replace(
        _spec(config, config["moe_intermediate_size"]),
        experts=experts,
        dense_layers=config.get("num_dense_layers", 2),
        dense_ffn_size=config["intermediate_size"],
    )


def _spec(config: Mapping[str, Any], ffn_size: int) -> DecoderSpec:
    """The spec without experts."""
    base = {"rope_theta": 1e6, "max_position_embeddings": 128_000, "rms_norm_eps": config.get("norm_eps", 1e-5)}
    tied = config.get("tie_embedding", config.get("tie_word_embeddings", True))
    spec = llama.decoder_spec({**base, **config, "intermediate_size": ffn_size, "tie_word_embeddings": tied})
    attending = config.get("full_attn_idxs")
    layers = range(spec.num_layers)
    kinds = config.get("layer_types") or [
        "full_attention" if attending is None or i in attending else "conv" for i in layers
    ]
    mixer = ShortConvSpec(spec.hidden_size, config.get("conv_L_cache", 3), config.get("conv_bias", False))
    stateful = tuple(kinds[i] == "conv" for i in layers)
    return replace(spec, qk_norm=True, mixer=mixer if any(stateful) else None, stateful=stateful)


def _ffn_size(config: Mapping[str, Any]) -> int:
    """The size of feed-forward layers, which a config states before it is adjusted."""
    size = int(config["block_ff_dim"] if "block_ff_dim" in config else config["intermediate_size"])
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    if (factor := config.get("block_ffn_dim_multiplier", 1.0)) is not None:
        multiple = config.get("block_multiple_of", 256)
        size = -(-int(factor * size) // multiple) * multiple
    return size
