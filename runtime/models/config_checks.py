"""Checks of a config.json: a table of fields that become sizes, counts and factors, with their bounds.

A model's folder comes from anywhere. Without this, a wrong value is a traceback, or gigabytes of layer names, or
weights that load and give garbage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from runtime.base.kv_cache_spec import RING
from runtime.base.sampling_fields import Bounds
from runtime.base.types import CallboardError

_WIDTH, _HEADS, _EXPERTS, _POSITIONS = Bounds(1, 1 << 20), Bounds(1, 1 << 16), Bounds(0, 1 << 12), Bounds(1, 1 << 30)
_POSITIVE = Bounds(above=0)
_NUMBERS: dict[str, tuple[Bounds, bool]] = {  # each field's bounds, and whether it is a whole number
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (Bounds(1, 1000), True)),
    **dict.fromkeys(("hidden_size", "n_embd", "intermediate_size", "moe_intermediate_size"), (_WIDTH, True)),
    **dict.fromkeys(("shared_intermediate_size",), (_WIDTH, True)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "head_dim"), (_HEADS, True)),
    **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), (_EXPERTS, True)),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), (_HEADS, True)),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), (_HEADS, True)),
    **dict.fromkeys(("linear_conv_kernel_dim", "conv_L_cache"), (Bounds(2, RING), True)),
    **dict.fromkeys(("shared_expert_intermediate_size", "block_ff_dim", "block_multiple_of"), (_WIDTH, True)),
    **dict.fromkeys(("full_attention_interval",), (Bounds(1), True)),
    **dict.fromkeys(("num_kv_shared_layers",), (Bounds(0), True)),
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads"), (_HEADS, True)),
    **dict.fromkeys(("hidden_size_per_layer_input", "top_k_experts"), (Bounds(0, 1 << 16), True)),
    **dict.fromkeys(("vocab_size_per_layer_input",), (Bounds(1, 1 << 24), True)),
    **dict.fromkeys(("num_dense_layers", "first_k_dense_replace", "n_shared_experts"), (Bounds(0, 1000), True)),
    **dict.fromkeys(("n_routed_experts",), (_EXPERTS, True)),
    **dict.fromkeys(("n_group", "topk_group"), (Bounds(1, 1 << 12), True)),
    **dict.fromkeys(("num_nextn_predict_layers",), (Bounds(0, 1000), True)),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), (_WIDTH, True)),
    **dict.fromkeys(("q_lora_rank",), (Bounds(0, 1 << 20), True)),
    **dict.fromkeys(("mscale", "mscale_all_dim"), (Bounds(0), False)),
    **dict.fromkeys(("block_ffn_dim_multiplier", "routed_scaling_factor"), (_POSITIVE, False)),
    **dict.fromkeys(("vocab_size",), (Bounds(1, 1 << 24), True)),
    **dict.fromkeys(("n_positions", "max_position_embeddings", "n_inner"), (_POSITIONS, True)),
    **dict.fromkeys(("original_max_position_embeddings",), (_POSITIONS, False)),
    **dict.fromkeys(("sliding_window", "sliding_window_pattern", "_sliding_window_pattern"), (_POSITIONS, True)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "partial_rotary_factor"), (Bounds(0, 1), False)),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "factor", "query_pre_attn_scalar"), (_POSITIVE, False)),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), (_POSITIVE, False)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier"), (_POSITIVE, False)),
    **dict.fromkeys(("attention_multiplier", "logits_scaling"), (_POSITIVE, False)),
    **dict.fromkeys(("no_rope_layer_interval",), (Bounds(1), True)),
    **dict.fromkeys(("llama_4_scaling_beta",), (Bounds(0), False)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (Bounds(0), False)),
}
_FLAGS = (
    "tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob",
    "attn_output_gate", "conv_bias", "use_expert_bias", "block_auto_adjust_ff_dim", "tie_embedding",
    "use_qk_norm", "qkv_bias", "rope_interleave", "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp",
)  # fmt: skip
_OBJECTS = ("rope_scaling", "rope_parameters", "full_attention", "sliding_attention")


def checked_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with whole numbers as integers. Its nulls are values.

    Raises CallboardError with one sentence for the first field that no model can have."""
    if config.get("is_causal") is False:
        raise CallboardError("The model's config.json has is_causal false; attention to later tokens is not supported.")
    config = dict(config)
    for name, value in config.items():
        if value is None or (name == "sliding_window" and value == 0 and config.get("use_sliding_window") is False):
            continue  # transformers 5 writes 0 for a window that is off
        if name in _NUMBERS:
            config[name] = _checked_number(name, value)
        elif name in _FLAGS and not isinstance(value, bool):
            raise CallboardError(f"The model's config.json has {name} {_shown(value)}; it must be true or false.")
        elif name in _OBJECTS:
            if not isinstance(value, Mapping):
                raise CallboardError(f"The model's config.json has {name} {_shown(value)}; it must be an object.")
            config[name] = checked_config(value)
    for name in ("layer_types", "no_rope_layers"):
        kinds, num_layers = config.get(name), config.get("num_hidden_layers", 0)
        if kinds is not None and not (isinstance(kinds, list) and len(kinds) >= num_layers):
            raise CallboardError(
                f"The model's config.json has {name} {_shown(kinds)}; it must be a list with one entry for each of "
                f"{num_layers} layers."
            )
    for heads, width in (("num_attention_heads", "hidden_size"), ("n_head", "n_embd")):
        if heads in config and width in config and config[heads] > config[width] and not config.get("head_dim"):
            raise CallboardError(
                f"The model's config.json has {heads} {config[heads]} for a {width} of {config[width]}; a head needs a "
                "dimension at least."
            )
    return config


def _checked_number(name: str, value: Any) -> Any:
    bounds, is_whole = _NUMBERS[name]
    if is_whole and type(value) is float and value.is_integer():
        value = int(value)
    is_number = type(value) is int or (type(value) is float and not is_whole and math.isfinite(value))
    if not (is_number and bounds.hold(value)):
        kind = "whole number" if is_whole else "number"
        raise CallboardError(f"The model's config.json has {name} {_shown(value)}; it must be a {kind} {bounds}.")
    return value


def _shown(value: object) -> str:
    return repr(value)[:40]
