"""Tiny models in the formats of quantized checkpoints."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from runtime.base.model.decoder_spec import chooses_experts
from runtime.base.model.sharding import stored_shape
from runtime.models import load_spec
from runtime.models.weights import random_parameter
from tests.support.models.quantized import Format
from tests.support.models.runner_driver import Driver

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 101, "hidden_size": 64, "intermediate_size": 160,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN = LLAMA | {
    "architectures": ["Qwen3_5ForCausalLM"], "head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 8, "linear_value_head_dim": 16, "full_attention_interval": 2,
}  # fmt: skip
QWEN_NEXT = QWEN | {
    "architectures": ["Qwen3NextForCausalLM"], "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
LFM = LLAMA | {
    "architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False
}  # fmt: skip
GLM = LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"], "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 2,
    "num_experts_per_tok": 2, "use_qk_norm": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
QWEN_MOE = LLAMA | {
    "architectures": ["Qwen2MoeForCausalLM"], "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96,
    "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
OLMOE = LLAMA | {"architectures": ["OlmoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2}
PHI = LLAMA | {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5}
DEEPSEEK = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"], "q_lora_rank": 32, "kv_lora_rank": 48, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip


def write(folder: Path, form: Format, config: dict = LLAMA, unquantized: str = "") -> tuple[Path, Path]:
    """A model in the format, and the library's dense numbers of it in bfloat16. Modules with a name that matches
    `unquantized` stay dense."""
    spec, weight_map = load_spec(config)
    generator = torch.Generator().manual_seed(3)
    quantized, dense, ignored = {}, {}, list[str]()
    for name, (parameter, *_) in weight_map.tensors_of(spec).items():
        weight = random_parameter(parameter, stored_shape(spec, parameter, spec.shapes()[parameter]), generator)
        module = name.removesuffix(".weight")
        if unquantized and re.fullmatch(unquantized, module):
            ignored.append(module)
        elif parameter.endswith(".weight") and not chooses_experts(parameter):
            tensors = form.pack(weight, generator)
            quantized |= {name.removesuffix("weight") + own: tensor.contiguous() for own, tensor in tensors.items()}
            weight = form.dequantize(tensors, tuple(weight.shape))
        dense[name] = weight.bfloat16().contiguous()
        if module in ignored or not parameter.endswith(".weight") or chooses_experts(parameter):
            quantized[name] = dense[name]
    stated = {"quantization_config": form.config | _ignoring(form, ignored)} if form.config else {}
    for path, tensors, added in ((folder / "quantized", quantized, stated), (folder / "dense", dense, {})):
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config | added))
    for name, content in form.files.items():
        (folder / "quantized" / name).write_text(json.dumps(content))
    return folder / "quantized", folder / "dense"


def _ignoring(form: Format, modules: list[str]) -> dict[str, Any]:
    """The part of a config that names modules without quantization."""
    if not modules:
        return {}
    if form.config["quant_method"] == "gptq":
        return {"dynamic": {f"-:{re.escape(module)}$": {} for module in modules}}
    key = "ignore" if form.config["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
    return {key: [*(form.config.get(key) or ()), *modules]}


def logits(runner) -> torch.Tensor:
    driver = Driver(runner)
    driver.open(0, list(range(40, 70)))
    return driver.prefill(0, list(range(40, 70)))
