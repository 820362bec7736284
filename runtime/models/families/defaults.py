"""Values for keys that a config.json leaves out: the defaults in transformers' config class for each architecture.

Published configs omit keys that have these values. tests/models/test_config_defaults.py compares the tables with
transformers. Defaults that follow from other keys, such as `layer_types`, are in the family files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from runtime.base.types import CallboardError


class _OrNull(NamedTuple):
    """A default for a key where null has its own meaning. Elsewhere null equals absence."""

    value: Any


class _Alias(NamedTuple):
    """Another name of a key."""

    name: str


_LLAMA: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0,
    "rope_parameters": None, "rope_scaling": None, "partial_rotary_factor": None, "attention_bias": False,
    "mlp_bias": False, "eos_token_id": _OrNull(2),
}  # fmt: skip
_NO_EOS = {"eos_token_id": None}
_MISTRAL = _LLAMA | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "sliding_window": _OrNull(4096), "layer_types": None,
}  # fmt: skip
_MINISTRAL_3 = _MISTRAL | {
    "vocab_size": 131072, "num_hidden_layers": 34, "head_dim": 128, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5, "sliding_window": None, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip
_QWEN_2 = _LLAMA | _NO_EOS | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": _OrNull(32),
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": _OrNull(4096),
    "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
_QWEN_2_MOE = _QWEN_2 | {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "decoder_sparse_step": 1, "mlp_only_layers": None, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False,
    "num_local_experts": _Alias("num_experts"), "qkv_bias": True,
}  # fmt: skip
_QWEN_3_MOE = _QWEN_2_MOE | {
    "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768,
    "num_experts_per_tok": 8, "num_experts": 128,
}  # fmt: skip
_QWEN_3_VL = _QWEN_2 | {
    "head_dim": 128, "max_position_embeddings": 128000, "rope_theta": 500000.0, "max_window_layers": 0,
    "mrope_section": (24, 20, 20), "mrope_interleaved": True,
}  # fmt: skip
_QWEN_3_VL_MOE = _QWEN_2_MOE | {
    "num_key_value_heads": 16, "max_position_embeddings": 128000, "rope_theta": 500000.0,
    "mrope_section": (24, 20, 20), "mrope_interleaved": True,
}  # fmt: skip
_QWEN_3_5 = _LLAMA | _NO_EOS | {
    "vocab_size": 248320, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 256, "max_position_embeddings": 32768, "partial_rotary_factor": _OrNull(0.25), "layer_types": None,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "mrope_section": (11, 11, 10), "mrope_interleaved": True,
}  # fmt: skip
_QWEN_3_5_MOE = _QWEN_3_5 | {
    "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8, "num_experts": 256,
}  # fmt: skip
_QWEN_3_NEXT = _QWEN_3_5_MOE | {
    "vocab_size": 151936, "num_hidden_layers": 48, "decoder_sparse_step": 1, "mlp_only_layers": None,
    "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True, "mrope_section": (),
}  # fmt: skip
_GEMMA_2 = _LLAMA | {
    "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "layer_types": None, "attn_logit_softcapping": _OrNull(50.0),
    "final_logit_softcapping": _OrNull(30.0), "eos_token_id": _OrNull(1),
}  # fmt: skip
_GEMMA_3 = _GEMMA_2 | {
    "vocab_size": 262208, "max_position_embeddings": 131072, "attn_logit_softcapping": None,
    "final_logit_softcapping": None, "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
}  # fmt: skip
_GEMMA_4 = _GEMMA_3 | {
    "vocab_size": 262144, "num_hidden_layers": 30, "sliding_window": 512, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144, "attention_k_eq_v": False, "num_kv_shared_layers": 0,
    "enable_moe_block": False, "use_double_wide_mlp": False, "global_head_dim": 512,
    "num_global_key_value_heads": None, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
}  # fmt: skip
_GLM = _LLAMA | {
    "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07, "attention_bias": True,
    "partial_rotary_factor": _OrNull(0.5), "eos_token_id": [151329, 151336, 151338],
}  # fmt: skip
_EXPERTS = {"num_local_experts": _Alias("n_routed_experts"), "n_shared_experts": 1, "norm_topk_prob": True}
_GLM_MOE = _GLM | _NO_EOS | _EXPERTS | {
    "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
    "head_dim": None, "rms_norm_eps": 1e-5, "attention_bias": False, "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "use_qk_norm": False, "num_nextn_predict_layers": 1,
}  # fmt: skip
_GLM_V = _GLM | _NO_EOS | {
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "head_dim": None, "partial_rotary_factor": None,
    "mrope_section": (8, 12, 12),
}  # fmt: skip
_GLM_V_MOE = _GLM_MOE | {
    "vocab_size": 151424, "max_position_embeddings": 65536, "attention_bias": True, "mrope_section": (8, 12, 12),
}  # fmt: skip
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
_DEEPSEEK_2 = _LLAMA | _LATENT | {
    "vocab_size": 102400, "q_lora_rank": _OrNull(1536), "first_k_dense_replace": 0, "n_group": None,
    "topk_group": None, "n_routed_experts": 64, "num_experts": _Alias("n_routed_experts"), "n_shared_experts": 2,
    "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0,
    "topk_method": "greedy", "norm_topk_prob": False,
}  # fmt: skip
_DEEPSEEK_3 = _LLAMA | _LATENT | _EXPERTS | {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "max_position_embeddings": 4096, "q_lora_rank": _OrNull(1536), "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "n_routed_experts": 256, "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "norm_topk_prob": _OrNull(True),
    "rope_interleave": _OrNull(True), "num_nextn_predict_layers": 1, "eos_token_id": _OrNull(1),
}  # fmt: skip
_GRANITE = _LLAMA | dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
)
_GRANITE_MOE = _GRANITE | {"num_local_experts": 8, "num_experts_per_tok": 2}
_LFM = _LLAMA | {
    "vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_key_value_heads": 8,
    "max_position_embeddings": 128000, "norm_eps": 1e-5, "tie_word_embeddings": True, "rope_theta": 1e6,
    "conv_bias": False, "conv_L_cache": 3, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True, "full_attn_idxs": None, "layer_types": None,
}  # fmt: skip
_OLMO_2 = _LLAMA | {"vocab_size": 50304, "rms_norm_eps": 1e-5, "eos_token_id": _OrNull(50279)}
_MISTRAL_SMALL = _MISTRAL | {  # replaces a text_config
    "vocab_size": 131072, "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40, "head_dim": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 1e9, "sliding_window": None, "tie_word_embeddings": True,
}  # fmt: skip

DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": _DEEPSEEK_2,
    "DeepseekV3ForCausalLM": _DEEPSEEK_3,
    "GPT2LMHeadModel": {
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False, "tie_word_embeddings": True, "eos_token_id": _OrNull(50256),
        "hidden_size": _Alias("n_embd"), "max_position_embeddings": _Alias("n_positions"),
        "num_attention_heads": _Alias("n_head"), "num_hidden_layers": _Alias("n_layer"),
    },
    "Gemma2ForCausalLM": _GEMMA_2,
    "Gemma3ForCausalLM": _GEMMA_3,
    "Gemma3ForConditionalGeneration": _GEMMA_3,
    "Gemma4ForCausalLM": _GEMMA_4,
    "Gemma4ForConditionalGeneration": _GEMMA_4,
    "Glm4ForCausalLM": _GLM,
    "Glm4MoeForCausalLM": _GLM_MOE,
    "Glm4MoeLiteForCausalLM": _DEEPSEEK_3 | {
        "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47,
        "num_attention_heads": 20, "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "n_routed_experts": 64,
        "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8, "q_lora_rank": _OrNull(768),
        "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4,
        "norm_topk_prob": True, "rope_interleave": True, "mlp_layer_types": None, "num_nextn_predict_layers": 0,
    },
    "Glm4vForConditionalGeneration": _GLM_V,
    "Glm4vMoeForConditionalGeneration": _GLM_V_MOE,
    "GlmForCausalLM": _GLM,
    "GptOssForCausalLM": _LLAMA | _NO_EOS | {
        "num_hidden_layers": 36, "num_local_experts": 128, "num_experts": _Alias("num_local_experts"),
        "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128, "layer_types": None,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_experts_per_tok": 4, "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0, "attention_bias": True, "rope_theta": 150000.0, "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "GraniteForCausalLM": _GRANITE,
    "GraniteMoeForCausalLM": _GRANITE_MOE,
    "GraniteMoeHybridForCausalLM": _GRANITE_MOE | {
        "shared_intermediate_size": 1024, "position_embedding_type": None, "layer_types": None,
        "layers_block_type": _Alias("layer_types"),
    },
    "Lfm2ForCausalLM": _LFM,
    "Lfm2VlForConditionalGeneration": _LFM,
    "Lfm2MoeForCausalLM": _LFM | {
        "hidden_size": 2048, "intermediate_size": 7168, "moe_intermediate_size": 1792, "num_dense_layers": 2,
        "num_experts_per_tok": 4, "num_experts": 32, "use_expert_bias": True, "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    "Idefics3ForConditionalGeneration": _LLAMA,
    "InternVLForConditionalGeneration": _QWEN_2 | {"tie_word_embeddings": True},
    "LlamaForCausalLM": _LLAMA,
    "Ministral3ForCausalLM": _MINISTRAL_3,
    "MinistralForCausalLM": _MISTRAL,
    "Mistral3ForConditionalGeneration": _MISTRAL_SMALL,
    "MistralForCausalLM": _MISTRAL,
    "MixtralForCausalLM": _MISTRAL | {
        "rms_norm_eps": 1e-5, "sliding_window": None, "rope_theta": 1e6, "num_experts_per_tok": 2,
        "num_local_experts": 8, "num_experts": _Alias("num_local_experts"),
    },
    "Olmo2ForCausalLM": _OLMO_2,
    "Olmo3ForCausalLM": _OLMO_2 | {"rope_theta": 500000.0, "sliding_window": 4096, "layer_types": None},
    "OlmoeForCausalLM": _OLMO_2 | {
        "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
        "max_position_embeddings": 4096, "clip_qkv": None, "num_experts_per_tok": 8, "num_experts": 64,
        "num_local_experts": _Alias("num_experts"), "norm_topk_prob": False,
    },
    "Phi3ForCausalLM": _LLAMA | {
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None,
        "layer_types": None, "eos_token_id": _OrNull(32000),
    },
    "Qwen2ForCausalLM": _QWEN_2,
    "Qwen2MoeForCausalLM": _QWEN_2_MOE,
    "Qwen3ForCausalLM": _QWEN_2 | {"head_dim": 128},
    "Qwen3MoeForCausalLM": _QWEN_3_MOE,
    "Qwen3NextForCausalLM": _QWEN_3_NEXT,
    "Qwen3VLForConditionalGeneration": _QWEN_3_VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN_3_VL_MOE,
    "Qwen3_5ForCausalLM": _QWEN_3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN_3_5,
    "Qwen3_5MoeForCausalLM": _QWEN_3_5_MOE,
    "Qwen3_5MoeForConditionalGeneration": _QWEN_3_5_MOE,
    "SeedOssForCausalLM": _LLAMA | {
        "vocab_size": 155136, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 80,
        "num_key_value_heads": _OrNull(8), "head_dim": _OrNull(128), "max_position_embeddings": 524288,
        "attention_bias": True, "attention_out_bias": False,
    },
    "SmolVLMForConditionalGeneration": _LLAMA,
    "SmolLM3ForCausalLM": _LLAMA | {
        "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": _OrNull(4), "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "rope_theta": 2000000.0, "use_sliding_window": False, "sliding_window": None, "layer_types": None,
        "no_rope_layers": None, "no_rope_layer_interval": 4, "eos_token_id": _OrNull(128001),
    },
}  # fmt: skip
_TEXTS = {"mistral": "MistralForCausalLM", "ministral3": "Ministral3ForCausalLM"}  # model_type of Mistral 3's text


def with_defaults(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return a text model's config.json, or the text part of another, with its architecture's defaults.

    Raises CallboardError if its text_config is not an object."""
    text = config.get("text_config")
    if not isinstance(text, Mapping | None):
        raise CallboardError(f"The model's config.json has text_config {str(text)[:40]!r}; it must be an object.")
    table = DEFAULTS.get(architecture, {})
    tied = config.get("tie_word_embeddings")
    if text:
        if architecture == "Mistral3ForConditionalGeneration":
            table = DEFAULTS.get(_TEXTS.get(text.get("model_type") or "mistral", ""), {})
        if tied is None:  # the outer class decides; a text part may name a head that its file lacks
            tied = DEFAULTS.get(architecture, {}).get("tie_word_embeddings") or text.get("tie_word_embeddings")
    given = {**(text or config), "tie_word_embeddings": tied}
    found = {name: value for name, value in table.items() if not isinstance(value, _Alias)}
    found = {name: value.value if isinstance(value, _OrNull) else value for name, value in found.items()}
    for name, value in sorted(given.items(), key=lambda item: isinstance(table.get(item[0]), _Alias)):
        default = table.get(name)
        if value is not None or isinstance(default, _OrNull):
            found[default.name if isinstance(default, _Alias) else name] = value
    return found
