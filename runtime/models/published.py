"""Some models' published shapes, as parts of their config.json.

`callboard models NAME` computes memory from them, and the benchmarks make random models from them."""

from __future__ import annotations

from typing import Any


def _llama3(factor: float, **shape: Any) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 128256,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "rope_scaling": scaling | {"original_max_position_embeddings": 8192}, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "tie_word_embeddings": True,
    } | shape  # fmt: skip


def _qwen3(**shape: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "vocab_size": 151936,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "bos_token_id": 151643, "eos_token_id": [151645, 151643], "attention_bias": False,
        "tie_word_embeddings": True,
    } | shape  # fmt: skip


def _qwen3_5(**shape: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
    return {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_act": "silu",
        "vocab_size": 248320, "head_dim": 256, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
        "rope_parameters": rope, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "full_attention_interval": 4,
        "eos_token_id": [248046, 248044], "tie_word_embeddings": False, "attention_bias": False,
        "mtp_num_hidden_layers": 1,
    } | shape  # fmt: skip


def _gemma4(**shape: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262144, "head_dim": 256, "global_head_dim": 512, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6, "sliding_window": 512, "final_logit_softcapping": 30.0, "bos_token_id": 2,
        "eos_token_id": [1, 106], "tie_word_embeddings": True,
    } | shape  # fmt: skip


def _gpt_oss(**shape: Any) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    dense = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_act": "silu", "vocab_size": 201088,
        "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0, "attention_bias": True,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
        "rope_scaling": rope | {"original_max_position_embeddings": 4096}, "tie_word_embeddings": False,
        "bos_token_id": 199998, "eos_token_id": [200002, 199999, 200012],
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": dense},
    } | shape  # fmt: skip


PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _llama3(
        32.0, num_hidden_layers=16, hidden_size=2048, num_attention_heads=32, head_dim=64, intermediate_size=8192
    ),
    "llama-3.2-3b": _llama3(
        32.0, num_hidden_layers=28, hidden_size=3072, num_attention_heads=24, head_dim=128, intermediate_size=8192
    ),
    "llama-3.1-8b": _llama3(
        8.0, num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, head_dim=128, intermediate_size=14336,
        tie_word_embeddings=False,
    ),
    "llama-3.1-70b": _llama3(
        8.0, num_hidden_layers=80, hidden_size=8192, num_attention_heads=64, head_dim=128, intermediate_size=28672,
        tie_word_embeddings=False,
    ),
    "qwen3-0.6b": _qwen3(num_hidden_layers=28, hidden_size=1024, num_attention_heads=16, intermediate_size=3072),
    "qwen3-4b": _qwen3(num_hidden_layers=36, hidden_size=2560, num_attention_heads=32, intermediate_size=9728),
    "qwen3-8b": _qwen3(
        num_hidden_layers=36, hidden_size=4096, num_attention_heads=32, intermediate_size=12288,
        tie_word_embeddings=False,
    ),
    "gemma-3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
        "vocab_size": 262144, "num_hidden_layers": 26, "hidden_size": 1152, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "sliding_window": 512,
        "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "bos_token_id": 2, "eos_token_id": [1, 106],
        "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 49152,
        "num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
        "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b": _qwen3(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_hidden_layers=48, hidden_size=2048,
        num_attention_heads=32, num_key_value_heads=4, intermediate_size=6144, moe_intermediate_size=768,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, tie_word_embeddings=False,
    ),
    "qwen3.5-9b": _qwen3_5(
        num_hidden_layers=32, hidden_size=4096, num_attention_heads=16, num_key_value_heads=4, intermediate_size=12288,
        linear_num_value_heads=32,
    ),
    "qwen3.6-27b": _qwen3_5(
        num_hidden_layers=64, hidden_size=5120, num_attention_heads=24, num_key_value_heads=4, intermediate_size=17408,
        linear_num_value_heads=48,
    ),
    "qwen3.6-35b-a3b": _qwen3_5(
        architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text", num_hidden_layers=40, hidden_size=2048,
        num_attention_heads=16, num_key_value_heads=2, linear_num_value_heads=32, moe_intermediate_size=512,
        shared_expert_intermediate_size=512, num_experts=256, num_experts_per_tok=8,
    ),
    "lfm2-1.2b": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 12288,
        "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5,
        "max_position_embeddings": 128000, "rope_theta": 1000000.0, "bos_token_id": 1, "eos_token_id": 7,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "vocab_size": 32000,
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768, "rope_theta": 1000000.0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt-oss-20b": _gpt_oss(num_hidden_layers=24, num_local_experts=32),
    "gpt-oss-120b": _gpt_oss(num_hidden_layers=36, num_local_experts=128),
    "glm-4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_act": "silu", "vocab_size": 151552,
        "num_hidden_layers": 46, "hidden_size": 4096, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": False,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "eos_token_id": [151329, 151336, 151338],
        "bos_token_id": 151331,
    },
    "olmoe-1b-7b": {
        "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_act": "silu", "vocab_size": 50304,
        "num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
        "intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "clip_qkv": None, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 4096,
        "bos_token_id": 50279, "eos_token_id": 50279, "tie_word_embeddings": False,
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "intermediate_size": 9216, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "bos_token_id": 2, "eos_token_id": [1, 107],
    },
    "gemma-4-e2b": _gemma4(
        num_hidden_layers=35, hidden_size=1536, intermediate_size=6144, num_attention_heads=8, num_key_value_heads=1,
        layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7, num_kv_shared_layers=20,
        use_double_wide_mlp=True,
    ),
    "gemma-4-e4b": _gemma4(
        num_hidden_layers=42, hidden_size=2560, intermediate_size=10240, num_attention_heads=8, num_key_value_heads=2,
        num_kv_shared_layers=18,
    ),
    "gemma-4-31b": _gemma4(
        num_hidden_layers=60, hidden_size=5376, intermediate_size=21504, num_attention_heads=32,
        num_key_value_heads=16, num_global_key_value_heads=4, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        sliding_window=1024, max_position_embeddings=262144,
    ),
    "gemma-4-26b-a4b": _gemma4(
        num_hidden_layers=30, hidden_size=2816, intermediate_size=2112, num_attention_heads=16, num_key_value_heads=8,
        num_global_key_value_heads=2, attention_k_eq_v=True, hidden_size_per_layer_input=0, enable_moe_block=True,
        num_experts=128, top_k_experts=8, moe_intermediate_size=704, sliding_window=1024,
        max_position_embeddings=262144,
    ),
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_act": "silu",
        "vocab_size": 102400, "num_hidden_layers": 27, "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "norm_topk_prob": False,
        "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        }, "bos_token_id": 100000, "eos_token_id": 100001, "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu",
        "vocab_size": 129280, "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
        "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        }, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
    },
    "glm-4.7-flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_act": "silu",
        "vocab_size": 154880, "num_hidden_layers": 47, "hidden_size": 2048, "num_attention_heads": 20,
        "num_key_value_heads": 20, "intermediate_size": 10240, "moe_intermediate_size": 1536, "n_routed_experts": 64,
        "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "kv_lora_rank": 512,
        "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256,
        "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "bos_token_id": 0,
        "eos_token_id": [154820, 154827, 154829], "tie_word_embeddings": False,
    },
    "smolvlm-256m": {
        "architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "image_token_id": 49190,
        "scale_factor": 4, "tie_word_embeddings": False, "text_config": {
            "model_type": "llama", "hidden_act": "silu", "vocab_size": 49280, "num_hidden_layers": 30,
            "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "bos_token_id": 1,
            "eos_token_id": 49279, "tie_word_embeddings": False,
        }, "vision_config": {
            "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
            "image_size": 512, "patch_size": 16,
        },
    },
    "qwen3-vl-8b": {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "image_token_id": 151655,
        "tie_word_embeddings": False, "text_config": _qwen3(
            model_type="qwen3_vl_text", num_hidden_layers=36, hidden_size=4096, num_attention_heads=32,
            intermediate_size=12288, max_position_embeddings=262144, rope_theta=5000000.0, tie_word_embeddings=False,
            rope_scaling={"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        ), "vision_config": {
            "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
            "out_hidden_size": 4096, "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24],
        },
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12,
        "n_head": 12, "n_positions": 1024, "bos_token_id": 50256, "eos_token_id": 50256,
    },
}  # fmt: skip
