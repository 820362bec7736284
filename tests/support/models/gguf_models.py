"""A small model of each GGUF architecture, and the metadata of its file."""

from typing import Any

SMALL = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "router_jitter_noise": 0.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
GEMMA = SMALL | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
GEMMA4 = SMALL | {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
    "head_dim": 16, "global_head_dim": 32, "vocab_size_per_layer_input": 61, "tie_word_embeddings": True,
}  # fmt: skip
GEMMA4_METADATA = {
    "gemma4.attention.sliding_window_pattern": [True, False] * 2, "gemma4.attention.sliding_window": 8,
    "gemma4.attention.key_length": 32, "gemma4.attention.key_length_swa": 16, "gemma4.rope.dimension_count": 32,
    "gemma4.rope.freq_base": 1e6, "gemma4.rope.freq_base_swa": 1e4,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.05, 1.1],
    "long_factor": [1.5, 4.0, 9.0],
    "original_max_position_embeddings": 16,
}
CONVS = SMALL | {"layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True}
DELTA = SMALL | {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
    "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "hidden_size": 64, "intermediate_size": 96,
}  # fmt: skip
# The architecture, the config of a model of it, and metadata that only it has.
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "llama", SMALL | {"attention_bias": True}, {"llama.rope.freq_base": 10000.0}),
    "llama-yarn": (
        "llama",
        "llama",
        SMALL | {"rope_parameters": YARN},
        {"llama.rope.freq_base": 10000.0, "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
         "llama.rope.scaling.original_context_length": 16},
    ),
    "mixtral": (
        "llama",
        "mixtral",
        SMALL | EXPERTS | {"num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"llama.rope.freq_base": 1e6, "llama.expert_count": 4, "llama.expert_used_count": 2},
    ),
    "qwen2": ("qwen2", "qwen2", SMALL, {"qwen2.rope.freq_base": 10000.0}),
    "qwen3": ("qwen3", "qwen3", SMALL | {"head_dim": 16, "tie_word_embeddings": True}, {}),
    "qwen3moe": (
        "qwen3moe",
        "qwen3_moe",
        SMALL | EXPERTS | {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 40, "norm_topk_prob": True},
        {"qwen3moe.expert_count": 4, "qwen3moe.expert_used_count": 2, "qwen3moe.expert_feed_forward_length": 40},
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        GEMMA | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
        {"gemma2.attention.sliding_window": 8, "gemma2.attn_logit_softcapping": 20.0,
         "gemma2.final_logit_softcapping": 10.0},
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 7},  # the sixth attends to all
        {"gemma3.attention.sliding_window": 8, "gemma3.rope.freq_base": 1e6},
    ),
    "gemma3-4b": (
        "gemma3",
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 7, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        {"gemma3.attention.sliding_window": 8, "gemma3.rope.freq_base": 1e6, "gemma3.rope.scaling.type": "linear",
         "gemma3.rope.scaling.factor": 8.0},
    ),
    "gemma4": (
        "gemma4",
        "gemma4_text",
        GEMMA4 | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32, "use_double_wide_mlp": True,
           "final_logit_softcapping": 10.0},
        GEMMA4_METADATA
        | {"gemma4.attention.shared_kv_layers": 2, "gemma4.embedding_length_per_layer_input": 32,
           "gemma4.feed_forward_length": [80, 80, 160, 160], "gemma4.final_logit_softcapping": 10.0},
    ),
    "gemma4moe": (
        "gemma4",
        "gemma4_text",
        GEMMA4
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
           "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 40},
        GEMMA4_METADATA
        | {"gemma4.attention.head_count_kv": [2, 1, 2, 1], "gemma4.expert_count": 4, "gemma4.expert_used_count": 2,
           "gemma4.expert_feed_forward_length": 40, "gemma4.embedding_length_per_layer_input": 0},
    ),
    "phi3": (
        "phi3",
        "phi3",
        SMALL | {"rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.5,
                 "original_max_position_embeddings": 16},
        {"phi3.rope.dimension_count": 6, "phi3.rope.scaling.original_context_length": 16,
         "phi3.rope.freq_base": 10000.0},
    ),
    "qwen2moe": (
        "qwen2moe",
        "qwen2_moe",
        SMALL | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 120},
        {"qwen2moe.expert_count": 4, "qwen2moe.expert_used_count": 2, "qwen2moe.expert_feed_forward_length": 40},
    ),
    "olmoe": (
        "olmoe", "olmoe", SMALL | EXPERTS | {"num_experts": 4},
        {"olmoe.expert_count": 4, "olmoe.expert_used_count": 2},
    ),
    "glm4moe": (
        "glm4moe",
        "glm4_moe",
        SMALL | {"head_dim": 12, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
                 "n_shared_experts": 2, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.5,
                 "use_qk_norm": True, "attention_bias": True},
        {"glm4moe.rope.dimension_count": 6, "glm4moe.expert_count": 6, "glm4moe.expert_used_count": 2,
         "glm4moe.expert_feed_forward_length": 40, "glm4moe.expert_shared_count": 2,
         "glm4moe.expert_group_count": 3, "glm4moe.expert_group_used_count": 2, "glm4moe.expert_weights_scale": 1.5,
         "glm4moe.expert_weights_norm": True, "glm4moe.leading_dense_block_count": 1, "glm4moe.block_count": 4,
         "glm4moe.nextn_predict_layers": 1},
    ),
    "glm4": ("glm4", "glm4", SMALL | {"head_dim": 12}, {"glm4.rope.dimension_count": 6}),
    "granite": (
        "granite",
        "granite",
        SMALL | {"attention_multiplier": 0.2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                 "logits_scaling": 8.0},
        {"granite.attention.scale": 0.2, "granite.embedding_scale": 12.0, "granite.residual_scale": 0.22,
         "granite.logit_scale": 8.0},
    ),
    "mistral3": (
        "mistral3",
        "ministral3",
        SMALL | {"head_dim": 16, "rope_parameters": YARN | {
            "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}},
        {"mistral3.rope.freq_base": 10000.0, "mistral3.rope.scaling.type": "yarn",
         "mistral3.rope.scaling.factor": 4.0, "mistral3.rope.scaling.original_context_length": 16,
         "mistral3.rope.scaling.yarn_log_multiplier": 1.0, "mistral3.attention.temperature_scale": 0.1},
    ),
    "olmo2": ("olmo2", "olmo2", SMALL, {}),
    "olmo3": (
        "olmo2",
        "olmo3",
        SMALL | {"sliding_window": 8, "num_hidden_layers": 4, "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 500000.0, "attention_factor": 1.2},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0}}},
        {"olmo2.attention.sliding_window": 8, "olmo2.attention.sliding_window_pattern": [True, True, True, False],
         "olmo2.rope.freq_base": 500000.0, "olmo2.rope.scaling.type": "yarn", "olmo2.rope.scaling.factor": 4.0,
         "olmo2.rope.scaling.original_context_length": 16, "olmo2.rope.scaling.attn_factor": 1.2},
    ),
    "seed_oss": ("seed_oss", "seed_oss", SMALL | {"head_dim": 16, "attention_bias": True}, {}),
    "smollm3": ("smollm3", "smollm3", SMALL | {"num_hidden_layers": 5}, {"smollm3.rope.freq_base": 2e6}),
    "lfm2": (
        "lfm2",
        "lfm2",
        CONVS | {"block_auto_adjust_ff_dim": False},
        {"lfm2.attention.head_count_kv": [0, 2, 0], "lfm2.shortconv.l_cache": 3, "lfm2.rope.freq_base": 1e6},
    ),
    "lfm2moe": (
        "lfm2moe",
        "lfm2_moe",
        CONVS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "num_dense_layers": 1},
        {"lfm2moe.attention.head_count_kv": [0, 2, 0], "lfm2moe.shortconv.l_cache": 3, "lfm2moe.rope.freq_base": 1e6,
         "lfm2moe.expert_count": 4, "lfm2moe.expert_used_count": 2, "lfm2moe.expert_feed_forward_length": 40,
         "lfm2moe.leading_dense_block_count": 1},
    ),
    "gpt2": (
        "gpt2",
        "gpt2",
        {"vocab_size": 61, "n_embd": 48, "n_inner": 80, "n_layer": 2, "n_head": 4, "n_positions": 64},
        {},
    ),
}  # fmt: skip
