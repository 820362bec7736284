"""Writes a GGUF file with random weights in a mixture's shape, cut to some layers: for comparisons on a CPU.

    python -m benchmarks.library.make_random_gguf /tmp/mixture.gguf --layers 8
    python -m benchmarks.cpu_peers --model /tmp/mixture.gguf --cells decode batch8 prompt --threads 2

The shape is Qwen3-30B-A3B's. The head is in Q6_K and the other weights are in Q4_K, as in most published files. The
vocabulary is the default model's.
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

_CONFIG = CONFIGS["qwen3-30b-a3b"]
_KINDS = gguf.GGMLQuantizationType
_SIZE = 0.02  # a weight's size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    writer, rng = gguf.GGUFWriter(args.path, "qwen3moe"), np.random.default_rng(0)
    vocab_size = _add_vocabulary(writer)
    _add_shape(writer, args.layers)
    hidden, head_dim = _CONFIG["hidden_size"], _CONFIG["head_dim"]
    q, kv = (_CONFIG[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    experts, ffn = _CONFIG["num_experts"], _CONFIG["moe_intermediate_size"]
    writer.add_tensor("token_embd.weight", *_q4_k(rng, vocab_size, hidden))
    writer.add_tensor("output.weight", *_q6_k(rng, vocab_size, hidden))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(args.layers):
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


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


def _add_shape(writer: gguf.GGUFWriter, num_layers: int) -> None:
    writer.add_block_count(num_layers)
    writer.add_context_length(_CONFIG["max_position_embeddings"])
    writer.add_embedding_length(_CONFIG["hidden_size"])
    writer.add_feed_forward_length(_CONFIG["intermediate_size"])
    writer.add_expert_feed_forward_length(_CONFIG["moe_intermediate_size"])
    writer.add_expert_count(_CONFIG["num_experts"])
    writer.add_expert_used_count(_CONFIG["num_experts_per_tok"])
    writer.add_head_count(_CONFIG["num_attention_heads"])
    writer.add_head_count_kv(_CONFIG["num_key_value_heads"])
    writer.add_key_length(_CONFIG["head_dim"])
    writer.add_value_length(_CONFIG["head_dim"])
    writer.add_layer_norm_rms_eps(_CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(_CONFIG["rope_theta"])


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
