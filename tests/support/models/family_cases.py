"""A tiny random checkpoint of every family and of its published variants, saved by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from runtime.base.model.decoder_spec import DecoderSpec, ExpertsSpec
from runtime.models import load_spec
from tests.support.models.specs import changed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CONTEXT = 32  # positions before a rope type stretches them
_BASE = {
    "vocab_size": 101,
    "hidden_size": 60,
    "intermediate_size": 76,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
_GPT2 = {"vocab_size": 101, "n_embd": 60, "n_layer": 3, "n_head": 6, "n_positions": 192, "eos_token_id": 2}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": CONTEXT}
_LONG = {"short_factor": [1.0, 1.1, 1.3, 1.4, 2.0], "long_factor": [1.0, 1.5, 3.0, 5.5, 7.0]}
_LOCAL = {"rope_type": "default", "rope_theta": 500.0}
_GEMMA4 = {
    "num_hidden_layers": 6, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 13, "global_head_dim": 20, "vocab_size_per_layer_input": 101, "tie_word_embeddings": True,
}  # fmt: skip
_MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.2,
    "logits_scaling": 10.0,
}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 60}
_GLM_VISION = _QWEN_VISION | {"image_size": 28, "patch_size": 14, "out_hidden_size": 128}
# configuration class -> fields of its text part, and of its vision part
WITH_IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma3Config": ({}, _VISION),
    "Gemma4Config": ({}, {**_VISION, "head_dim": 8, "num_key_value_heads": 2}),
    "Glm4vConfig": ({}, _GLM_VISION),
    "Glm4vMoeConfig": ({}, _GLM_VISION),
    "Idefics3Config": ({"model_type": "llama"}, _VISION),
    "InternVLConfig": ({"model_type": "qwen2"}, _VISION | {"image_size": [28, 28], "patch_size": [14, 14]}),
    "Lfm2VlConfig": ({"model_type": "lfm2"}, {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}),
    "Mistral3Config": ({"model_type": "mistral"}, _VISION),
    "Qwen3VLConfig": ({}, _QWEN_VISION | {"deepstack_visual_indexes": [0]}),
    "Qwen3VLMoeConfig": ({}, _QWEN_VISION | {"deepstack_visual_indexes": [0]}),
    "Qwen3_5Config": ({}, _QWEN_VISION),
    "Qwen3_5MoeConfig": ({}, _QWEN_VISION),
    "SmolVLMConfig": ({"model_type": "llama"}, _VISION),
}
# name of a configuration class -> another model's name than its own with ForCausalLM
_MODELS = {
    "GPT2Config": "GPT2LMHeadModel", "Gemma3TextConfig": "Gemma3ForCausalLM", "Gemma4TextConfig": "Gemma4ForCausalLM",
    "Qwen3_5TextConfig": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeTextConfig": "Qwen3_5MoeForCausalLM",
}  # fmt: skip
_DELTA = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 12, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_SHARED = {
    "moe_intermediate_size": 28, "shared_expert_intermediate_size": 28, "num_experts": 9, "num_experts_per_tok": 3,
}  # fmt: skip
_CONVS = {
    "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16, "norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip
_LATENT = {
    "head_dim": 8, "kv_lora_rank": 20, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3,
    "moe_intermediate_size": 28, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "num_key_value_heads": 6,
}  # fmt: skip
_ALIGNED_LATENT = _LATENT | {"kv_lora_rank": 32, "v_head_dim": 16}  # that compiled kernels of a CPU take
_GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 13}
_MXFP4 = {  # as the published config has it
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def _rope(kind: str, theta: float = 1000.0, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **parameters}}


def yarn(original: int = CONTEXT, **parameters: Any) -> dict[str, Any]:
    """The part of a config that sets this rope type."""
    return _rope("yarn", factor=4.0, original_max_position_embeddings=original, **parameters)


def _longrope(original: int, **config: Any) -> dict[str, Any]:
    return _rope("longrope", **_LONG) | {"original_max_position_embeddings": original} | config


# name -> (configuration class, fields that differ)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, all heads, biases": (
        "LlamaConfig",
        {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "linear": ("LlamaConfig", _rope("linear", factor=2.0)),
    "dynamic": ("LlamaConfig", _rope("dynamic", factor=4.0) | {"max_position_embeddings": CONTEXT}),
    "llama3": ("LlamaConfig", _rope("llama3", factor=8.0, **_LLAMA3)),
    "yarn": ("LlamaConfig", yarn()),
    "yarn, scaled": ("LlamaConfig", yarn(mscale=0.8, mscale_all_dim=0.5, beta_fast=8.0, truncate=False)),
    "idefics3": ("Idefics3Config", {}),
    "internvl": ("InternVLConfig", {"tie_word_embeddings": True}),
    "smolvlm": ("SmolVLMConfig", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral, window": ("MistralConfig", {"sliding_window": 13}),
    "mistral, some windows": (
        "MinistralConfig",
        {"sliding_window": 13, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "mistral, with a vision tower": ("Mistral3Config", {"sliding_window": None}),
    "ministral3": ("Ministral3Config", yarn(llama_4_scaling_beta=0.3, mscale=1.0, mscale_all_dim=1.0)),
    "ministral3, with a vision tower": (
        "Mistral3Config",
        {"model_type": "ministral3", "tie_word_embeddings": True} | yarn(llama_4_scaling_beta=0.1),
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral, window": (
        "MixtralConfig",
        {"sliding_window": 13, "num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 6},
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen2 moe": ("Qwen2MoeConfig", _SHARED | {"shared_expert_intermediate_size": 84}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3, with a vision tower": ("Qwen3VLConfig", {}),
    "qwen3 moe, with a vision tower": (
        "Qwen3VLMoeConfig",
        {"moe_intermediate_size": 28, "num_experts": 9, "num_experts_per_tok": 3},
    ),
    "qwen3 moe": ("Qwen3MoeConfig", {"moe_intermediate_size": 28, "num_experts": 9, "num_experts_per_tok": 3}),
    "qwen3 moe, normalized": (
        "Qwen3MoeConfig",
        {"moe_intermediate_size": 28, "num_experts": 8, "num_experts_per_tok": 8, "norm_topk_prob": True},
    ),
    "gemma2": ("Gemma2Config", {"sliding_window": 13, "head_dim": 14, "query_pre_attn_scalar": 20}),
    "gemma2, tight caps": (
        "Gemma2Config",
        {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0, "num_key_value_heads": 6},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 13, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma3, stretched": (
        "Gemma3TextConfig",
        {
            "sliding_window": 13,
            "num_hidden_layers": 4,
            "sliding_window_pattern": 2,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": _LOCAL,
            },
        },
    ),
    "gemma3, with a vision tower": ("Gemma3Config", {"sliding_window": 13, "tie_word_embeddings": True}),
    "gemma4": (
        "Gemma4TextConfig",
        _GEMMA4
        | {
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4, keys as values": (
        "Gemma4TextConfig",
        _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    ),
    "gemma4 moe": (
        "Gemma4TextConfig",
        _GEMMA4
        | {
            "hidden_size_per_layer_input": 0,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "enable_moe_block": True,
            "num_experts": 9,
            "top_k_experts": 3,
            "moe_intermediate_size": 28,
        },
    ),
    "gemma4, with a vision tower": ("Gemma4Config", _GEMMA4 | {"hidden_size_per_layer_input": 8}),
    "phi3": ("Phi3Config", {"sliding_window": 30}),
    "phi3, short context": ("Phi3Config", _longrope(180)),
    "phi3, long context": ("Phi3Config", _longrope(CONTEXT)),
    "phi4-mini": (
        "Phi3Config",
        _longrope(CONTEXT, head_dim=12, hidden_size=72, partial_rotary_factor=0.84, tie_word_embeddings=True),
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmoe": ("OlmoeConfig", {"num_experts": 6, "num_experts_per_tok": 2}),
    "olmo3": (
        "Olmo3Config",
        {
            "sliding_window": 13,
            "num_hidden_layers": 4,
            "rope_parameters": {"full_attention": yarn()["rope_parameters"], "sliding_attention": _LOCAL},
        },
    ),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "smollm3, window": (
        "SmolLM3Config",
        {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 13, "tie_word_embeddings": False},
    ),
    "granite": ("GraniteConfig", _MULTIPLIERS),
    "granite moe": ("GraniteMoeConfig", _MULTIPLIERS | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "granite 4": (
        "GraniteMoeHybridConfig",
        _MULTIPLIERS
        | {"num_local_experts": 0, "shared_intermediate_size": 76, "position_embedding_type": "rope"}
        | {"layer_types": ["attention"] * 3, "mamba_n_heads": 4, "head_dim": 10},
    ),
    "seed": ("SeedOssConfig", {"num_key_value_heads": 3}),
    "glm": ("GlmConfig", {"head_dim": 20, "hidden_size": 60}),
    "glm4 moe": (
        "Glm4MoeConfig",
        {
            "moe_intermediate_size": 28,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.8,
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 12,
        },
    ),
    "glm4 moe, one group": (
        "Glm4MoeConfig",
        {
            "moe_intermediate_size": 28,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 2,
            "norm_topk_prob": False,
            "head_dim": 12,
        },
    ),
    "glm4v": ("Glm4vConfig", {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64}),
    "glm4v moe": (
        "Glm4vMoeConfig",
        {
            "hidden_size": 128,
            "head_dim": 128,
            "moe_intermediate_size": 28,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "glm4": ("Glm4Config", {"head_dim": 12, "num_key_value_heads": 3}),
    "qwen3.5": ("Qwen3_5TextConfig", _DELTA),
    "qwen3.5, with a vision tower": ("Qwen3_5Config", _DELTA | {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3.5 moe": ("Qwen3_5MoeTextConfig", _DELTA | _SHARED),
    "qwen3.5 moe, with a vision tower": ("Qwen3_5MoeConfig", _DELTA | _SHARED),
    "qwen3-next": ("Qwen3NextConfig", _DELTA | _SHARED | {"linear_num_value_heads": 6}),
    "qwen3-next, not normalized": (
        "Qwen3NextConfig",
        _DELTA | _SHARED | {"linear_num_value_heads": 2, "norm_topk_prob": False, "partial_rotary_factor": 0.5},
    ),
    "lfm2": ("Lfm2Config", _CONVS),
    "lfm2, biases": (
        "Lfm2Config",
        _CONVS
        | {"conv_bias": True, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False, "conv_L_cache": 4},
    ),
    "lfm2, with a vision tower": ("Lfm2VlConfig", _CONVS),
    "lfm2 moe": (
        "Lfm2MoeConfig",
        _CONVS
        | {
            "moe_intermediate_size": 28,
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek v2 lite": (
        "DeepseekV2Config",
        _ALIGNED_LATENT
        | {"q_lora_rank": None, "n_shared_experts": 2}
        | yarn(mscale=0.707, mscale_all_dim=0.707, beta_fast=32.0),
    ),
    "deepseek v2": (
        "DeepseekV2Config",
        _LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0},
    ),
    "deepseek v3": (
        "DeepseekV3Config",
        _ALIGNED_LATENT | {"n_group": 4, "topk_group": 2} | yarn(mscale=1.0, mscale_all_dim=1.0),
    ),
    "glm 4.7 flash": (
        "Glm4MoeLiteConfig",
        _LATENT | {"qk_nope_head_dim": 14, "v_head_dim": 22, "n_group": 1, "topk_group": 1, "rope_interleave": False},
    ),
    "gpt-oss": ("GptOssConfig", _GPT_OSS | yarn(truncate=False)),
    "gpt-oss, mxfp4": (
        "GptOssConfig",
        _GPT_OSS
        | yarn(truncate=False)
        | {"hidden_size": 64, "intermediate_size": 128, "sliding_window": 100, "quantization_config": _MXFP4},
    ),
    "gpt2": ("GPT2Config", {}),
    "gpt2, narrow": ("GPT2Config", {"n_inner": 50, "n_head": 3, "layer_norm_epsilon": 1e-3}),
}

LIKE_OTHERS = {  # cases that differ from another in their files, not in their computation
    "glm4v", "glm4v moe", "idefics3", "internvl", "smolvlm", "mistral, some windows", "mistral, with a vision tower",
    "ministral3, with a vision tower",
    "olmo2", "lfm2, with a vision tower", "qwen3, with a vision tower",
    "qwen3 moe, with a vision tower",
    "gemma4, with a vision tower", "smollm3, window", "granite 4", "seed", "glm", "qwen3.5, with a vision tower",
    "qwen3.5 moe, with a vision tower",
}  # fmt: skip

# Models without a checkpoint: name -> (case, fields of its config that differ, fields of its spec that differ)
SPECS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "expert biases": (
        "qwen3 moe",
        {},
        {
            "ffn_bias": True,
            "activation": "swiglu_clamped",
            "experts": ExpertsSpec(9, 3, False, scores="softmax_of_chosen", router_bias=True),
        },
    ),
    "sinks": (
        "mistral, some windows",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        {"sinks": True},
    ),
}


def spec_of(case: str, **changes: Any) -> DecoderSpec:
    """The spec, without the checkpoint: from a config as transformers would write it but for its defaults."""
    if case in SPECS:
        case, of_config, of_spec = SPECS[case]
        return changed(spec_of(case, **of_config | changes), **of_spec)
    kind, own = CASES[case]
    ending = "ForConditionalGeneration" if kind in WITH_IMAGES else "ForCausalLM"
    architecture = _MODELS.get(kind) or kind.replace("Config", ending)
    base = _GPT2 if kind == "GPT2Config" else _BASE
    return load_spec({**base, **own, **changes, "architectures": [architecture]})[0]


def config_of(case: str, **other: Any) -> PreTrainedConfig:
    """The configuration of transformers. `other` fields differ from the case's."""
    import transformers  # a machine with a GPU may not have it

    kind, changes = CASES[case]
    changes = {name: value for name, value in (changes | other).items() if name != "quantization_config"}
    config_class: type[PreTrainedConfig] = getattr(transformers, kind)
    if kind not in WITH_IMAGES:
        return config_class(**(_GPT2 if kind == "GPT2Config" else _BASE) | changes, initializer_range=0.15)
    (text, vision), tied = WITH_IMAGES[kind], changes.get("tie_word_embeddings", False)
    text = text | _BASE | changes
    return config_class(text_config=text, vision_config=vision, mm_tokens_per_image=4, tie_word_embeddings=tied)


def random_model(model_class: Any, config: PreTrainedConfig) -> PreTrainedModel:
    """A model with norms and biases unlike the neutral ones that transformers initialises."""
    config._attn_implementation = "eager"  # the one with soft caps, and one with the plainest sums
    config._experts_implementation = "eager"  # the others want aligned sizes of bf16
    torch.manual_seed(1)
    model: PreTrainedModel = model_class(config).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
    for name, buffer in model.named_buffers():
        if name.endswith(("layer_scalar", "bias")):  # "bias": of the choice of experts
            buffer.add_(torch.randn_like(buffer) * 0.3)
    return model


def save_model(folder: Path, case: str, **other: Any) -> PreTrainedModel:
    """The checkpoint of a random model. `other` fields of its config differ from the case's."""
    import transformers  # a machine with a GPU may not have it

    quantization = CASES[case][1].get("quantization_config")
    config = config_of(case, **other)
    if isinstance(getattr(config, "text_config", None), transformers.PreTrainedConfig):
        model_class = getattr(transformers, CASES[case][0].replace("Config", "ForConditionalGeneration"))
    else:
        model_class = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    model = random_model(model_class, config)
    model.save_pretrained(folder)
    if quantization is not None:
        _to_mxfp4(folder, model, quantization)
    return model


def _to_mxfp4(folder: Path, model: PreTrainedModel, quantization: dict[str, Any]) -> None:
    """Replace the experts of a saved gpt-oss, and of the model, by random numbers in the published layout."""
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    tensors = load_file(folder / "model.safetensors")
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            num_experts, columns, rows = parameter.shape
            blocks = torch.randint(0, 256, (num_experts, rows, columns // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 124, blocks.shape[:3], dtype=torch.uint8)
            parameter.data = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            del tensors[name]
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
