"""Writes a `transformers` model as a GGUF file, the way llama.cpp's convert_hf_to_gguf.py does.

Names come from the `gguf` package's own table. The converter's changes to weights and its metadata are spelled out
here, in a few lines for each architecture."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

INTERLEAVED = {"llama", "granite", "mistral3", "smollm3"}  # converted as a LlamaModel, which permutes q and k
_ARCH = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def export(
    model: PreTrainedModel,
    arch: str,
    path: Path,
    tables: dict[str, list[float]] | None = None,  # RoPE's tables, which the converter puts among the weights
    parts: int = 1,
    block_type: str = "F32",  # of tensors with several dimensions
    **metadata: Any,  # that not every architecture has
) -> Path:
    """Returns the path of the file, or of the first part."""
    config = model.config
    get = lambda *names: next(v for n in names if (v := getattr(config, n, None)) is not None)  # noqa: E731
    values = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "context_length": config.max_position_embeddings,
        "feed_forward_length": get("intermediate_size", "n_inner"),
        "attention.head_count": config.num_attention_heads,
    }
    if arch == "gpt2":
        values["attention.layer_norm_epsilon"] = config.layer_norm_epsilon
    else:
        values |= {
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "attention.key_length": getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
        }
    metadata = {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in values.items()} | metadata
    names = gguf.get_tensor_name_map(_ARCH[arch], config.num_hidden_layers)
    tensors = {name: np.array(table, np.float32) for name, table in (tables or {}).items()}
    for name, weight in _stacked(_without_copies(model)):
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert renamed is not None, name
        tensors[renamed] = _converted(renamed, weight.float().numpy(), arch, config)
    return _write(path, arch, metadata, tensors, parts, gguf.GGMLQuantizationType[block_type])[0]


def _without_copies(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A model's own tensors, under the names that its checkpoint has."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    return state


def _stacked(state: dict[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    """Experts' gate_up, which `transformers` stores as one tensor, as the two tensors of GGUF."""
    for name, weight in state.items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
        else:
            yield name + ".weight" * name.endswith("experts.down_proj"), weight


def _converted(name: str, weight: np.ndarray, arch: str, config: Any) -> np.ndarray:
    if arch in INTERLEAVED and "attn_q." in name:
        return permuted(weight, config.num_attention_heads)
    if arch in INTERLEAVED and "attn_k." in name:
        return permuted(weight, config.num_key_value_heads)
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return weight + np.float32(1)
    if arch == "gpt2" and weight.ndim == 2 and name.startswith("blk."):
        return np.ascontiguousarray(weight.T)
    return np.ascontiguousarray(weight)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """LlamaModel.permute: from halves to interleaved pairs."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _write(
    path: Path,
    arch: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    parts: int,
    quant_type: gguf.GGMLQuantizationType,
) -> list[Path]:
    paths = [path.with_name(f"{path.stem}-{i + 1:05d}-of-{parts:05d}.gguf") for i in range(parts)]
    paths = paths if parts > 1 else [path]
    for part, name in enumerate(paths):
        writer = gguf.GGUFWriter(name, arch)  # which writes general.architecture
        split = {"split.no": part, "split.count": parts, "split.tensors.count": len(tensors)} if parts > 1 else {}
        for key, value in (({} if part else metadata) | split).items():
            match value:
                case _ if key == "general.architecture":
                    pass
                case str():
                    writer.add_string(key, value)
                case bool():
                    writer.add_bool(key, value)
                case int():
                    writer.add_uint32(key, value)
                case float():
                    writer.add_float32(key, value)
                case list():
                    writer.add_array(key, value)
        for i, (tensor_name, data) in enumerate(tensors.items()):
            if i % parts == part:
                kind = quant_type if data.ndim > 1 else gguf.GGMLQuantizationType.F32
                writer.add_tensor(tensor_name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths
