"""A tiny model in a file: each of its tokens depends on all tokens before it."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from runtime.text.pieces import BYTE_OF_CHAR

TINY_TOKENS = [
    "<|end|>",
    "<|start|>",
    *sorted(BYTE_OF_CHAR, key=lambda c: BYTE_OF_CHAR[c]),
    "he",
    "ll",
    "hell",
    "Ġhell",
]


def write_tiny_gguf(path: Path, tensors: dict[str, np.ndarray] | None = None, **metadata: Any) -> Path:
    """Writes a GGUF file with one llama layer (hidden 32, 2 heads, 1 KV head, 262 tokens) and its tokenizer.

    Other arguments replace metadata (None leaves a key out) or, as `tensors`, add or replace tensors."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, Any] = {
        "llama.block_count": 1,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.context_length": 128,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TINY_TOKENS,
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "Ġ hell"],
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(TINY_TOKENS) - 2)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}",
    }
    for key, value in (values | {k.replace("__", "."): v for k, v in metadata.items()}).items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    quantized = {
        "token_embd.weight": ((len(TINY_TOKENS), 32), "Q8_0"),
        "blk.0.attn_q.weight": ((32, 32), "Q4_1"),
        "blk.0.attn_k.weight": ((16, 32), "Q5_0"),
        "blk.0.attn_v.weight": ((16, 32), "F16"),
        "blk.0.attn_output.weight": ((32, 32), "Q4_0"),
        "blk.0.ffn_gate.weight": ((64, 32), "BF16"),
        "blk.0.ffn_up.weight": ((64, 32), "Q5_1"),
        "blk.0.ffn_down.weight": ((32, 64), "F32"),
    }
    for tensor_name, (shape, kind) in quantized.items():
        quant_type = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(rng.standard_normal(shape, np.float32), quant_type)
        writer.add_tensor(tensor_name, data, raw_dtype=quant_type)
    norms = {n: np.ones(32, np.float32) for n in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    for tensor_name, values_f32 in ({f"{n}.weight": v for n, v in norms.items()} | (tensors or {})).items():
        writer.add_tensor(tensor_name, values_f32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
