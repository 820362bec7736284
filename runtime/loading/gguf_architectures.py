"""What a GGUF file means: its tensors under their Hugging Face names and order, and its metadata as a config.json.

An architecture is one entry of `ARCHITECTURES`: a table of names, the tensors whose rows were reordered, a config.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.core.types import CallboardError
from runtime.loading.gguf import GgufFile, dequantize

_BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one value of `general.architecture` translates."""

    block_names: dict[str, str]  # GGUF name within a block -> HF name within a layer
    # Tensors whose rows the converter put into the order of interleaved RoPE pairs -> metadata key of their head count.
    interleaved: dict[str, str]
    config: Callable[[GgufFile], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A GGUF file read as a model of a supported architecture."""

    file: GgufFile
    config: dict[str, Any]  # as config.json has it
    sources: dict[str, str]  # HF name -> GGUF name
    interleaved_heads: dict[str, int]  # HF name of each tensor in interleaved order -> its number of heads

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of the tensor of this HF name, rows in HF's order: [num_rows, row_bytes]."""
        raw = self.file.raw(self.sources[name])
        if (heads := self.interleaved_heads.get(name)) is None:
            return raw
        # Llama's GGUF pairs RoPE's rows (0,1)(2,3)..., HF's layout pairs (0,d/2)(1,d/2+1)...; blocks of quantised
        # weights lie within a row, so the rows move as bytes.
        (rows, *_) = self.file.tensors[self.sources[name]].shape
        if rows % (2 * heads):
            raise CallboardError(
                f"{self.file.path}: tensor {self.sources[name]!r} has {rows} rows, which make no {heads} even heads."
            )
        halves = raw.reshape(heads, rows // heads // 2, 2, -1)
        return halves.swapaxes(1, 2).reshape(raw.shape)


def read_gguf_model(file: GgufFile) -> GgufModel:
    """Translates names and metadata; raises CallboardError for an architecture or a tensor that is not known here."""
    arch_name = file.value("general.architecture", str)
    arch = ARCHITECTURES.get(arch_name)
    if arch is None:
        raise CallboardError(
            f"{file.path} is a {arch_name!r} model; of GGUF files these architectures are supported: "
            f"{', '.join(ARCHITECTURES)}."
        )
    sources: dict[str, str] = {}
    interleaved_heads: dict[str, int] = {}
    for name in file.tensors:
        if name == "rope_freqs.weight":
            continue  # not a weight: RoPE's scaling as a table, which the config states
        hf_name = _TOP_TENSORS.get(name)
        if (block := _BLOCK_TENSOR.fullmatch(name)) and block[2] in arch.block_names:
            hf_name = f"model.layers.{int(block[1])}.{arch.block_names[block[2]]}.{block[3]}"
            if heads_key := arch.interleaved.get(block[2]):
                interleaved_heads[hf_name] = _count(file, heads_key)
        if hf_name is None:
            raise CallboardError(f"{file.path}: tensor {name!r} is not one that a {arch_name!r} model has here.")
        sources[hf_name] = name
    return GgufModel(file, arch.config(file), sources, interleaved_heads)


def gguf_eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """The ids that end a text, a turn or a message, the model's own end-of-sequence id first."""
    keys = ("eos", "eot", "eom")
    ids = [file.value(f"tokenizer.ggml.{k}_token_id", int, -1) for k in keys]
    return tuple(dict.fromkeys(i for i in ids if i >= 0))


def _count(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.value(key, int, default)
    if value < 1:
        raise CallboardError(f"{file.path}: {key} is {value}; it must be at least 1.")
    return value


def _real(file: GgufFile, key: str, default: float | None = None) -> float:
    """A float32 of the file as its shortest decimal: 9.99999975e-06 was written as 1e-05."""
    value = float(str(np.float32(file.value(key, float, default))))
    if not (math.isfinite(value) and value > 0):
        raise CallboardError(f"{file.path}: {key} is {value}; it must be a positive number.")
    return value


def _llama_config(file: GgufFile) -> dict[str, Any]:
    if "token_embd.weight" not in file.tensors:
        raise CallboardError(f"{file.path} has no tensor 'token_embd.weight'; the file is incomplete.")
    if file.value("llama.expert_count", int, 0):
        raise CallboardError(f"{file.path} is a mixture-of-experts model, which is not supported from GGUF.")
    hidden_size = _count(file, "llama.embedding_length")
    num_heads = _count(file, "llama.attention.head_count")
    head_dim = _count(file, "llama.rope.dimension_count", hidden_size // num_heads)
    rope_theta = _real(file, "llama.rope.freq_base", 10000.0)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": _count(file, "llama.feed_forward_length"),
        "num_hidden_layers": _count(file, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _count(file, "llama.attention.head_count_kv", num_heads),
        "head_dim": _count(file, "llama.attention.key_length", head_dim),
        "hidden_act": "silu",
        "rms_norm_eps": _real(file, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": rope_theta,
        "max_position_embeddings": _count(file, "llama.context_length"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id", int, 1),
        "eos_token_id": list(gguf_eos_token_ids(file)),
    }
    if scaling := _llama_rope_scaling(file, rope_theta, head_dim):
        config["rope_scaling"] = scaling
    return config


def _llama_rope_scaling(file: GgufFile, rope_theta: float, rope_dim: int) -> dict[str, Any] | None:
    """RoPE's scaling as config.json has it, or None.

    Llama 3.1's is stored as the table of divisors that it results in; the one free parameter of the released models,
    the factor, is the table's largest entry, and the table made from it must be the one in the file."""
    kind = file.value("llama.rope.scaling.type", str, "none")
    if kind == "linear":
        return {"rope_type": "linear", "factor": _real(file, "llama.rope.scaling.factor")}
    if kind != "none":
        raise CallboardError(f"{file.path}: RoPE scaling {kind!r} is not supported from GGUF; linear and llama3 are.")
    if "rope_freqs.weight" not in file.tensors:
        return None
    divisors = dequantize(file.raw("rope_freqs.weight"), file.tensors["rope_freqs.weight"].type_name).reshape(-1)
    factor, original, low, high = float(divisors.max()), 8192, 1.0, 4.0
    if factor == 1.0:
        return None
    turns = original * rope_theta ** -(np.arange(0, rope_dim, 2) / rope_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise CallboardError(f"{file.path}: the table in rope_freqs.weight is not Llama 3's RoPE scaling.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        block_names={
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
        interleaved={"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"},
        config=_llama_config,
    ),
}
