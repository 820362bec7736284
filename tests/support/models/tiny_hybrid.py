"""A tiny model with recurrent states in a GGUF file, with the tokenizer of tiny_gguf.py."""

from pathlib import Path

import torch

from tests.support.models.gguf_export import export
from tests.support.models.tiny_gguf import TINY_TOKENS

_CONFIG = {
    "vocab_size": len(TINY_TOKENS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 16384,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
TOKENIZER = {  # metadata
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TINY_TOKENS,
    "tokenizer.ggml.merges": ["h e", "l l", "he ll", "Ġ hell"],
    "tokenizer.ggml.token_type": [3, 3, *[1] * (len(TINY_TOKENS) - 2)],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
}
_METADATA = TOKENIZER | {
    "qwen35.ssm.conv_kernel": 4,
    "qwen35.ssm.state_size": 16,
    "qwen35.ssm.group_count": 2,
    "qwen35.ssm.time_step_rank": 4,
    "qwen35.ssm.inner_size": 64,
    "qwen35.full_attention_interval": 2,
    "qwen35.rope.dimension_count": 8,
    "qwen35.rope.freq_base": 10000.0,
}


def write_tiny_hybrid(path: Path) -> Path:
    """Writes one layer with the gated delta rule and one with attention (hidden 32, 262 tokens)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **_CONFIG), dtype=torch.float32)
    for parameter in model.parameters():  # each token depends on many before it
        torch.nn.init.normal_(parameter, std=0.4)
    return export(model, "qwen35", path, **_METADATA)
