"""LFM2: a gated short convolution in most layers, attention with an RMSNorm on each head's q and k in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec
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
        normalized=config["norm_topk_prob"],
        scores="sigmoid",
        choice_bias=config["use_expert_bias"],
        sum_eps=_SUM_EPS,
        scale=config["routed_scaling_factor"],
    )
    return replace(
        _spec(config, config["moe_intermediate_size"]),
        experts=experts,
        dense_layers=config["num_dense_layers"],
        dense_ffn_size=config["intermediate_size"],
    )


def _spec(config: Mapping[str, Any], ffn_size: int) -> DecoderSpec:
    """The spec without experts."""
    tied = config.get("tie_embedding", config["tie_word_embeddings"])
    own = {"rms_norm_eps": config["norm_eps"], "intermediate_size": ffn_size, "tie_word_embeddings": tied}
    spec = llama.decoder_spec({**config, **own})
    attending = config["full_attn_idxs"]
    layers = range(spec.num_layers)
    kinds = config["layer_types"] or [
        "full_attention" if attending is None or i in attending else "conv" for i in layers
    ]
    mixer = ShortConvSpec(spec.hidden_size, config["conv_L_cache"], config["conv_bias"])
    stateful = tuple(kinds[i] == "conv" for i in layers)
    return replace(spec, qk_norm=True, mixer=mixer if any(stateful) else None, stateful=stateful)


def _ffn_size(config: Mapping[str, Any]) -> int:
    """The size of feed-forward layers, which a config states before it is adjusted."""
    size = int(config.get("block_ff_dim", config["intermediate_size"]))
    if not config["block_auto_adjust_ff_dim"]:
        return size
    multiple = config["block_multiple_of"]
    return int(-(-int(config["block_ffn_dim_multiplier"] * int(2 * size / 3)) // multiple) * multiple)
