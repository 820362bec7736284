"""Writes a GGUF file with random weights in a published shape: for comparisons on a CPU.

    python -m benchmarks.library.make_random_gguf /tmp/mixture.gguf --layers 8
    python -m benchmarks.cpu_peers --model /tmp/mixture.gguf --cells decode batch8 prompt --threads 2
    python -m benchmarks.library.make_random_gguf /tmp/smolvlm.gguf --shape smolvlm-256m --layers 30

A mixture's head is in Q6_K and its other weights are in Q4_K, as in most published files. SmolVLM's text part is in
Q8_0. The vocabulary is the default model's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.library.models import CONFIGS
from runtime.base.config import DEFAULT_MODEL
from runtime.loading.gguf import GgufFile
from runtime.loading.resolve import resolve

_KINDS = gguf.GGMLQuantizationType
_SIZE = 0.02  # a weight's size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--shape", choices=("qwen3-30b-a3b", "smolvlm-256m"), default="qwen3-30b-a3b")
    args = parser.parse_args()
    config = CONFIGS[args.shape]
    writer = gguf.GGUFWriter(args.path, "llama" if "text_config" in config else "qwen3moe")
    vocab_size = _add_vocabulary(writer)
    if "text_config" in config:
        _add_dense(writer, config["text_config"], args.layers, vocab_size)
    else:
        _add_mixture(writer, config, args.layers, vocab_size)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def _add_dense(writer: gguf.GGUFWriter, config: dict[str, Any], num_layers: int, vocab_size: int) -> None:
    rng, hidden, ffn = np.random.default_rng(0), config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head_dim
    _add_shape(writer, config | {"head_dim": head_dim}, num_layers)
    writer.add_rope_dimension_count(head_dim)
    shapes = {"token_embd": (vocab_size, hidden), "output": (vocab_size, hidden), "output_norm": (hidden,)}
    for layer in range(num_layers):
        own = {"attn_norm": (hidden,), "ffn_norm": (hidden,), "ffn_down": (hidden, ffn)}
        own |= {f"attn_{name}": (hidden, hidden) for name in ("q", "output")}
        own |= {f"attn_{name}": (kv, hidden) for name in ("k", "v")} | {
            "ffn_gate": (ffn, hidden),
            "ffn_up": (ffn, hidden),
        }
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in own.items()}
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
        else:
            values = rng.standard_normal(shape, np.float32) * _SIZE
            quantized = gguf.quants.quantize(values, _KINDS.Q8_0)
            writer.add_tensor(f"{name}.weight", quantized, raw_dtype=_KINDS.Q8_0)


def _add_mixture(writer: gguf.GGUFWriter, config: dict[str, Any], num_layers: int, vocab_size: int) -> None:
    rng, hidden, head_dim = np.random.default_rng(0), config["hidden_size"], config["head_dim"]
    _add_shape(writer, config, num_layers)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    q, kv = (config[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    experts, ffn = config["num_experts"], config["moe_intermediate_size"]
    writer.add_tensor("token_embd.weight", *_q4_k(rng, vocab_size, hidden))
    writer.add_tensor("output.weight", *_q6_k(rng, vocab_size, hidden))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(num_layers):
        for name, size in (
            ("attn_norm", hidden),
            ("ffn_norm", hidden),
            ("attn_q_norm", head_dim),
            ("attn_k_norm", head_dim),
        ):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, np.float32))
        shapes = {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q)}
        shapes |= {f"ffn_{name}_exps": (experts, ffn, hidden) for name in ("gate", "up")}
        for name, shape in (shapes | {"ffn_down_exps": (experts, hidden, ffn)}).items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", *_q4_k(rng, *shape))
        router = rng.standard_normal((experts, hidden), np.float32) * _SIZE
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)


def _add_vocabulary(writer: gguf.GGUFWriter) -> int:
    """Copy the default model's vocabulary; return its number of tokens."""
    source = GgufFile(resolve(DEFAULT_MODEL))
    names = "model", "pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id"
    for name in names:
        key = f"tokenizer.ggml.{name}"
        value = source.metadata[key]
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    return len(source.metadata["tokenizer.ggml.tokens"])


def _add_shape(writer: gguf.GGUFWriter, config: dict[str, Any], num_layers: int) -> None:
    writer.add_block_count(num_layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])


def _q4_k(rng: np.random.Generator, *shape: int) -> tuple[Any, None, _KINDS]:
    """Random 256-element blocks: d and dmin as float16, 12 bytes for scales and minimums, 128 bytes for values."""
    blocks = _random_bytes(rng, shape, 144)
    d = _SIZE / (31.5 * 4.6)  # mean scale times the values' deviation
    blocks[..., :4] = np.array([d, 7.5 * d], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1), None, _KINDS.Q4_K


def _q6_k(rng: np.random.Generator, *shape: int) -> tuple[Any, None, _KINDS]:
    """Random 256-element blocks: 192 value bytes, 16 scales, and d as float16."""
    blocks = _random_bytes(rng, shape, 210)
    blocks[..., 208:] = np.array([_SIZE / (74 * 18.5)], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1), None, _KINDS.Q6_K


def _random_bytes(rng: np.random.Generator, shape: tuple[int, ...], size: int) -> Any:
    return rng.integers(0, 256, (*shape[:-1], shape[-1] // 256, size), np.uint8)


if __name__ == "__main__":
    main()
