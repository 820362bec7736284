"""Tiny models in the formats of quantized checkpoints."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from runtime.models import load_spec
from runtime.models.weights import random_parameter
from tests.support.models.quantized import Format
from tests.support.models.runner_driver import Driver

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 101, "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
PHI = LLAMA | {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5}


def write(folder: Path, form: Format, config: dict = LLAMA) -> tuple[Path, Path]:
    """A model in the format, and the library's dense numbers of it in bfloat16."""
    spec, weight_map = load_spec(config)
    generator = torch.Generator().manual_seed(3)
    quantized, dense = {}, {}
    for parameter, name in weight_map.names_of(spec).items():
        weight = random_parameter(parameter, spec.shapes()[parameter], generator)
        if parameter.endswith(".weight") and "router" not in parameter:
            tensors = form.pack(weight, generator)
            quantized |= {name.removesuffix("weight") + own: tensor.contiguous() for own, tensor in tensors.items()}
            weight = form.dequantize(tensors, tuple(weight.shape))
        else:
            quantized[name] = weight.bfloat16()
        dense[name] = weight.bfloat16().contiguous()
    stated = {"quantization_config": form.config} if form.config else {}
    for path, tensors, added in ((folder / "quantized", quantized, stated), (folder / "dense", dense, {})):
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config | added))
    for name, content in form.files.items():
        (folder / "quantized" / name).write_text(json.dumps(content))
    return folder / "quantized", folder / "dense"


def logits(runner) -> torch.Tensor:
    driver = Driver(runner)
    driver.open(0, list(range(40, 70)))
    return driver.prefill(0, list(range(40, 70)))
