"""Writes a `transformers` model as a GGUF file, the way llama.cpp's convert_hf_to_gguf.py does.

Names come from the `gguf` package's own table. The converter's changes to weights and its metadata are spelled out
here, in a few lines for each architecture."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

INTERLEAVED = {
    "llama",
    "granite",
    "granitemoe",
    "mistral3",
    "smollm3",
}  # converted as a LlamaModel, which permutes q and k
_RENAMED = {  # ends of names, before the table of the package
    ".dt_bias": ".dt_proj.bias", "expert_bias": "expert_bias.bias", "layer_scalar": "layer_scalar.weight",
    "router.scale": "router.proj.scale", "router.per_expert_scale": "experts.down_proj.scale",
}  # fmt: skip
_ARCH = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def export(
    model: PreTrainedModel,
    arch: str,
    path: Path,
    tables: dict[str, list[float]] | None = None,  # RoPE's tables, which the converter puts among the weights
    parts: int = 1,
    block_type: str = "F32",  # of tensors with several dimensions
    split_up: bool = False,  # kv_b of latent attention is two tensors, as newer converters write it
    **metadata: Any,  # that not every architecture has
) -> Path:
    """Returns the path of the file, or of the first part."""
    config = model.config
    config.allow_global_per_layer_attribute_access = True  # Gemma 4's layers differ
    get = lambda *names: next((v for n in names if (v := getattr(config, n, None)) is not None), None)  # noqa: E731
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
            "attention.layer_norm_rms_epsilon": get("rms_norm_eps", "norm_eps"),
            "attention.key_length": getattr(config, "head_dim", config.hidden_size // config.num_attention_heads),
        }
    known = {f"{arch}.{k}": v for k, v in values.items() if v is not None}
    metadata = {"general.architecture": arch} | known | metadata
    names = gguf.get_tensor_name_map(_ARCH[arch], config.num_hidden_layers)
    tensors = {name: np.array(table, np.float32) for name, table in (tables or {}).items()}
    state = _without_copies(model)
    state = _in_turn(state) if arch == "gpt-oss" else _ungrouped(state, config, split_up)
    for name, weight in _stacked(state, arch):
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
        assert renamed is not None, name
        renamed += ".weight" * renamed.endswith("sinks")
        tensors[renamed] = _converted(renamed, weight.float().numpy(), arch, config)
    return _write(path, arch, metadata, tensors, parts, gguf.GGMLQuantizationType[block_type])[0]


def head_tables(head: nn.Module, arch: str, config: Any) -> dict[str, np.ndarray]:
    """The tensors of a head that transformers calls MtpLayer, in the block behind the model's."""
    index, found = config.num_hidden_layers, {}
    names = gguf.get_tensor_name_map(_ARCH[arch], index + 1)
    own = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head_norm"}
    state = head.state_dict()
    for name, part in own.items():
        tensor = f"blk.{index}.nextn.{part}.weight"
        found[tensor] = _converted(tensor, state.pop(f"{name}.weight").numpy(), arch, config)
    layer = {name.replace("mtp_block.", f"model.layers.{index}."): weight for name, weight in state.items()}
    for name, weight in _stacked(_ungrouped(layer, config, split_up=False), arch):
        renamed = names.get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
        assert renamed is not None, name
        found[renamed] = _converted(renamed, weight.numpy(), arch, config)
    return found


def _without_copies(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A model's own tensors, under the names that its checkpoint has."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    return state


def _stacked(state: dict[str, torch.Tensor], arch: str) -> Iterable[tuple[str, torch.Tensor]]:
    """Experts' gate_up, which `transformers` stores as one tensor, as the two tensors of GGUF. Gemma 4 has one."""
    for name, weight in state.items():
        if arch == "gemma4" and name.endswith("experts.gate_up_proj"):
            yield f"{name}.weight", weight
        elif name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                yield _granite(name.replace("gate_up_proj", f"{part}_proj.weight")), half
        else:
            yield _granite(name + ".weight" * name.endswith("experts.down_proj")), weight


def with_stacked_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gate and up of all four experts as one tensor, and their down, as transformers has them."""
    parts = ("gate", "up", "down")
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name}):
        own = {part: [tensors[f"{prefix}.experts.{e}.{part}_proj.weight"] for e in range(4)] for part in parts}
        gate, up, down = (torch.stack(own[part]) for part in parts)
        stacked |= {f"{prefix}.experts.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.experts.down_proj": down}
    return stacked


def _granite(name: str) -> str:
    """A name in the gguf package's table, which lacks transformers 5's names for Granite's experts."""
    return re.sub(r"(block_sparse_moe\.experts\.\w+)_proj", r"\1", name).replace(
        "block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight"
    )


def _in_turn(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """GptOssModel: gate and up apart, as [experts, out, in]."""
    renamed = {}
    for name, weight in state.items():
        stem, kind = name.removesuffix("_bias"), "bias" if name.endswith("_proj_bias") else "weight"
        own = weight.transpose(1, 2) if weight.ndim == 3 else weight
        if stem.endswith("experts.gate_up_proj"):
            for i, part in enumerate(("gate", "up")):
                renamed[f"{stem.replace('gate_up', part)}.{kind}"] = own[:, i::2]
        else:
            renamed[f"{stem}.{kind}" if ".experts." in name else name] = own
    return renamed


def _ungrouped(state: dict[str, torch.Tensor], config: Any, split_up: bool) -> dict[str, torch.Tensor]:
    """Weights under names of the converter: Qwen3-Next's q, k, v and z apart, perhaps kv_b in two, biases as such."""
    renamed = {}
    for name, weight in state.items():
        if name.endswith("in_proj_qkvz.weight"):
            key, value = config.linear_key_head_dim, config.linear_value_head_dim
            group = config.linear_num_value_heads // config.linear_num_key_heads * value
            rows = weight.view(config.linear_num_key_heads, -1, weight.shape[1])
            q, k, v, z = (part.flatten(0, 1) for part in rows.split([key, key, group, group], 1))
            renamed[name.replace("qkvz", "qkv")] = torch.cat((q, k, v))
            renamed[name.replace("qkvz", "z")] = z
        elif name.endswith("kv_b_proj.weight") and split_up:
            k, v = weight.unflatten(0, (config.num_attention_heads, -1)).split(
                [config.qk_nope_head_dim, config.v_head_dim], 1
            )
            renamed[name.replace("kv_b", "k_b")] = k.transpose(1, 2).contiguous()
            renamed[name.replace("kv_b", "v_b")] = v.contiguous()
        else:
            name = name.replace("e_score_correction_bias", "e_score_correction.bias")
            for own, other in _RENAMED.items():
                name = name.replace(own, other) if name.endswith(own) else name
            renamed[name] = weight
    return renamed


def _tiled(name: str, weight: np.ndarray, config: Any) -> np.ndarray:
    """_LinearAttentionVReorderBase: value heads in the order of ggml's repeat."""
    keys, size = config.linear_num_key_heads, config.linear_value_head_dim
    first = 2 * keys * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    dim = 1 if "ssm_out" in name else 0
    moved = weight.swapaxes(0, dim)
    count = config.linear_num_value_heads * (1 if re.search("alpha|beta|ssm_a$|ssm_dt", name) else size)
    heads = moved[first : first + count].reshape(keys, config.linear_num_value_heads // keys, -1, *moved.shape[1:])
    return np.concatenate((moved[:first], heads.swapaxes(0, 1).reshape(-1, *moved.shape[1:]))).swapaxes(0, dim)


def _converted(name: str, weight: np.ndarray, arch: str, config: Any) -> np.ndarray:
    if arch in INTERLEAVED and "attn_q." in name:
        return permuted(weight, config.num_attention_heads)
    if arch in INTERLEAVED and "attn_k." in name:
        return permuted(weight, config.num_key_value_heads)
    if (
        arch.startswith(("gemma2", "gemma3", "qwen35", "qwen3next"))
        and name.endswith("norm.weight")
        and "ssm_norm" not in name
    ):
        return weight + np.float32(1)
    weight = -np.exp(weight) if name.endswith("ssm_a") else weight
    weight = weight.squeeze() if "conv1d" in name or "shortconv.conv." in name or "gate_inp_shexp" in name else weight
    if arch.startswith("qwen35") and re.search("attn_qkv|attn_gate|ssm_(?!norm)", name):
        weight = _tiled(name, weight, config)
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
                has_blocks = data.ndim > 1 and data.shape[-1] % 32 == 0 and not tensor_name.endswith(".bias")
                kind = quant_type if has_blocks else gguf.GGMLQuantizationType.F32
                writer.add_tensor(tensor_name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths
