"""Writes an image model of `transformers` as two GGUF files, the way llama.cpp's converter does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers

from tests.support.models.gguf_export import _write, export, permuted

_PROJECTORS = {
    "gemma3": "gemma3", "gemma4": "gemma4v", "glm4v": "glm4v", "idefics3": "idefics3", "lfm2_vl": "lfm2",
    "mistral3": "pixtral", "qwen3_vl": "qwen3vl_merger", "qwen3_5": "qwen3vl_merger", "smolvlm": "idefics3",
}  # fmt: skip
_WORDS = {"mistral3": "[IMG]", "gemma3": "<image_soft_token>", "gemma4": "<|image|>", "glm4v": "<|image|>"}
_RENAMED = (  # our checkpoint's names -> names that the package's table has
    (r"^model\.visual\.", "visual."), (r"\.linear\.weight", ".weight"),
    (r"^(model\.)?vision_tower\.(embeddings|post_layernorm|encoder)", r"vision_tower.vision_model.\2"),
    (r"^model\.multi_modal_projector", "multi_modal_projector"), (r"_table$", "_table.weight"), ("_weight$", ".weight"),
    (r"^model\.embed_vision\.embedding_projection", "multi_modal_projector.mm_input_projection"),
    (r"^visual\.merger\.linear_fc1", "multi_modal_projector.linear_0"),
    (r"^visual\.merger\.linear_fc2", "multi_modal_projector.linear_2"),
    (r"^visual\.merger\.norm", "visual.post_layernorm"),
)  # fmt: skip


def export_image_model(model: Any, folder: Path, arch: str, swapped: bool = False, **text: Any) -> Path:
    """Return the path of the text's file. `swapped` writes up and down as older converters did."""
    config = model.config
    kind, vision = config.model_type, config.vision_config
    words = [f"w{i}" for i in range(config.text_config.vocab_size)]
    words[150] = _WORDS.get(kind, "<|image_pad|>" if "qwen" in kind else "<image>")
    text_config = config.text_config
    if kind == "qwen3_vl":
        text_config = transformers.Qwen3Config(**{**text_config.to_dict(), "model_type": "qwen3"})
    if kind == "glm4v":
        text_config = transformers.Glm4Config(**{**text_config.to_dict(), "model_type": "glm4"})
    texts = transformers.AutoModelForCausalLM.from_config(text_config).eval()
    path = export(texts, arch, folder / "model.gguf", **{"tokenizer.ggml.tokens": words}, **text)
    layers = getattr(vision, "num_hidden_layers", 0) or vision.depth
    deepstack = list(getattr(vision, "deepstack_visual_indexes", ()))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, layers)
    limits = (".input_min", ".input_max", ".output_min", ".output_max")
    tensors = {}
    for name, tensor in model.state_dict().items():
        if re.search(r"language_model|text_model|lm_head|vision_tower\.head", name):
            continue
        array = np.atleast_1d(tensor.float().numpy())
        short = re.sub(r"^model\.(vision_tower|multi_modal)", r"\1", name) if kind in ("gemma3", "mistral3") else name
        short = short.replace("model.vision_tower.encoder.", "vision_model.model.") if kind == "gemma4" else short
        for pattern, replaced in _RENAMED:
            short = re.sub(pattern, replaced, short)
        if match := re.match(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)\.(\w+)", short):
            tensors[f"v.deepstack.{deepstack[int(match[1])]}.{match[2]}.{match[3]}"] = array
            continue
        if array.ndim == 5:
            tensors |= {"v.patch_embd.weight": array[:, :, 0], "v.patch_embd.weight.1": array[:, :, 1]}
            continue
        found = names.get_name(short, try_suffixes=(".weight", ".bias", *limits))
        assert found is not None, (name, short)
        if found == "v.patch_embd.weight" and array.ndim == 2:
            side = vision.patch_size
            array = array.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        if kind == "mistral3" and re.search(r"attn_[qk]\.", found):
            array = permuted(array, vision.num_attention_heads)
        if swapped:
            found = re.sub("ffn_(up|down)", lambda m: f"ffn_{'down' if m[1] == 'up' else 'up'}", found)
        tensors[found] = np.ascontiguousarray(array + np.float32(1) if "soft_emb_norm" in found else array)
    _write(folder / "mmproj-model-f16.gguf", "clip", _metadata(config, layers, deepstack), tensors, 1, _F32)
    return path


_F32 = gguf.GGMLQuantizationType.F32


def _metadata(config: Any, layers: int, deepstack: list[int]) -> dict[str, Any]:
    vision, kind = config.vision_config, config.model_type
    heads = getattr(vision, "num_attention_heads", None) or vision.num_heads
    found = {
        "projector_type": _PROJECTORS[kind], "vision.embedding_length": vision.hidden_size,
        "vision.block_count": layers,
        "vision.feed_forward_length": vision.intermediate_size, "vision.attention.head_count": heads,
        "vision.patch_size": vision.patch_size, "vision.image_size": getattr(vision, "image_size", 224),
        "vision.projection_dim": config.text_config.hidden_size, "has_vision_encoder": True,
        "vision.attention.layer_norm_epsilon": 1e-5 if kind == "mistral3" else 1e-6,
        "vision.image_mean": [0.0] * 3 if kind == "gemma4" else [0.5] * 3,
        "vision.image_std": [1.0] * 3 if kind == "gemma4" else [0.25] * 3,
        "use_silu": getattr(vision, "hidden_act", "") == "silu",
    }  # fmt: skip
    merge = {
        "gemma3": lambda: vision.image_size // vision.patch_size // int(config.mm_tokens_per_image**0.5),
        "gemma4": lambda: vision.pooling_kernel_size, "idefics3": lambda: config.scale_factor,
        "smolvlm": lambda: config.scale_factor, "lfm2_vl": lambda: config.downsample_factor,
    }  # fmt: skip
    if kind in merge:
        found["vision.projector.scale_factor"] = merge[kind]()
    else:
        found["vision.spatial_merge_size"] = getattr(config, "spatial_merge_size", 2)
    if "qwen" in kind:
        found["vision.is_deepstack_layers"] = [i in deepstack for i in range(layers)]
    return {f"clip.{key}": value for key, value in found.items()}
