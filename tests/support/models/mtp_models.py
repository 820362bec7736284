"""Tiny models with a head in their checkpoint, and transformers' layer as the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import MtpLayer

_COMMON = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": False,
    "pad_token_id": None,
}  # fmt: skip
_HYBRID = _COMMON | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
_QWEN_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16
}  # fmt: skip
_EXPERTS = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
           "head_dim": 8, "num_key_value_heads": 4}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("qwen3_5_text", _HYBRID),
    "qwen3.5-moe": ("qwen3_5_moe_text", _HYBRID | _QWEN_EXPERTS),
    "qwen3-next": ("qwen3_next", _HYBRID | _QWEN_EXPERTS),
    "glm4-moe": (
        "glm4_moe",
        _COMMON | _EXPERTS | {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5},
    ),
    "glm4-moe-lite": ("glm4_moe_lite", _COMMON | _EXPERTS | _LATENT | {"mlp_layer_types": ["dense", "sparse"]}),
    "deepseek-v3": ("deepseek_v3", _COMMON | _EXPERTS | _LATENT),
}
_QWEN_METADATA = {
    "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 64,
    "full_attention_interval": 2, "rope.dimension_count": 8, "rope.freq_base": 10000.0,
}  # fmt: skip
_EXPERTS_METADATA = {
    "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16, "expert_shared_count": 1,
    "rope.freq_base": 10000.0,
}  # fmt: skip
_NEXTN_METADATA = _EXPERTS_METADATA | {
    "expert_group_count": 2, "expert_group_used_count": 1, "expert_weights_norm": True, "leading_dense_block_count": 1,
    "expert_gating_func": 2,
}  # fmt: skip
GGUF: dict[str, tuple[str, dict[str, Any]]] = {  # architecture and metadata of files
    "qwen3.5": ("qwen35", _QWEN_METADATA),
    "qwen3.5-moe": ("qwen35moe", _QWEN_METADATA | _EXPERTS_METADATA),
    "glm4-moe": ("glm4moe", _NEXTN_METADATA | {"expert_weights_scale": 1.5, "rope.dimension_count": 8}),
    "deepseek-v3": (
        "deepseek2",
        _NEXTN_METADATA
        | {"expert_weights_scale": 2.5, "attention.q_lora_rank": 24, "attention.kv_lora_rank": 24,
           "rope.dimension_count": 8, "attention.key_length": 32, "attention.value_length": 24,
           "attention.key_length_mla": 24, "attention.value_length_mla": 16, "attention.head_count_kv": 1},
    ),
}  # fmt: skip
_QWEN_NAMES = {
    "enorm.": "mtp.pre_fc_norm_embedding.", "hnorm.": "mtp.pre_fc_norm_hidden.", "eh_proj.": "mtp.fc.",
    "post_norm.": "mtp.norm.", "mtp_block.": "mtp.layers.0.",
}  # fmt: skip
_NEXTN_NAMES = {
    "enorm.": "model.layers.2.enorm.", "hnorm.": "model.layers.2.hnorm.", "eh_proj.": "model.layers.2.eh_proj.",
    "post_norm.": "model.layers.2.shared_head.norm.", "mtp_block.": "model.layers.2.",
}  # fmt: skip


def random_pair(name: str, **changes: Any) -> tuple[PreTrainedModel, MtpLayer]:
    """A model of MODELS, and its head, with random weights."""
    kind, config = MODELS[name]
    config = config | changes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.float32).eval()
    head = head_beside(model.model, model.config)
    for module in (model, head):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        for key, buffer in module.named_buffers():
            if key.endswith("bias"):
                torch.nn.init.normal_(buffer, std=0.2)
    return model, head


def head_beside(text: PreTrainedModel, config: Any) -> MtpLayer:
    """A head with a layer like the last one of a model's text part."""
    last = text.layers[-1]
    norm = next(type(module) for key, module in last.named_modules() if key == "input_layernorm")
    return MtpLayer(config, type(last), norm, 1).eval()


def head_tensors(name: str, head: MtpLayer, stacked: bool) -> dict[str, torch.Tensor]:
    """The head's tensors as checkpoints name them, experts in one tensor or apart."""
    renamed = _QWEN_NAMES if name.startswith("qwen") else _NEXTN_NAMES
    found: dict[str, torch.Tensor] = {}
    for key, tensor in head.state_dict().items():
        begin = next(begin for begin in renamed if key.startswith(begin))
        full = renamed[begin] + key.removeprefix(begin)
        if stacked or not full.endswith(("gate_up_proj", "down_proj")):
            found[full] = tensor.clone()
            continue
        stem, _, part = full.rpartition(".")
        for i, own in enumerate(tensor):
            parts = (
                {"gate_proj": own.chunk(2)[0], "up_proj": own.chunk(2)[1]} if part == "gate_up_proj" else {part: own}
            )
            found |= {f"{stem}.{i}.{each}.weight": piece.clone() for each, piece in parts.items()}
    return found


def write_model(folder: Path, model: PreTrainedModel, extra: dict[str, torch.Tensor], **config: Any) -> Path:
    """A checkpoint of the model with these tensors besides, and fields of its config."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **extra}, file, {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@torch.inference_mode()
def oracle(model: PreTrainedModel, head: MtpLayer, token_ids: list[int], sample: int, count: int) -> torch.Tensor:
    """[count, vocabulary]: logits of draft tokens, each from all tokens anew."""
    hidden = model.model(torch.tensor([token_ids])).last_hidden_state
    tokens, found = [*token_ids[1:], sample], []
    for _ in range(count):
        embeds = model.get_input_embeddings()(torch.tensor([tokens]))
        positions = torch.arange(1, len(tokens) + 1)[None]
        turns = model.model.rotary_emb(embeds, positions)
        mask = torch.full((len(tokens),) * 2, -torch.inf).triu(1)[None, None]
        y = head(embeds, hidden, turns, mask, positions, None)
        found.append(model.lm_head(y[0, -1:]))
        tokens.append(int(found[-1].argmax()))
        hidden = torch.cat((hidden, y[:, -1:]), 1)
    return torch.cat(found)
