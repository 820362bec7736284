"""A model that ranks can divide among themselves, as a folder."""

from pathlib import Path

import torch

from benchmarks.library.make_random_model import write_folder
from runtime.models import load_spec
from runtime.models.weights import random_parameter

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262,
    "max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "bos_token_id": 1, "eos_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip


def write_divisible_model(folder: Path, seed: int = 0) -> Path:
    """One llama layer of random weights, always the same for a seed; returns the folder."""
    shapes = load_spec(CONFIG)[0].shapes()
    generator = torch.Generator().manual_seed(seed)
    write_folder(folder, CONFIG, lambda name: random_parameter(name, shapes[name], generator))
    return folder
