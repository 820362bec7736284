"""The metadata of a GGUF file as a config.json, for the architectures of Gemma."""

from __future__ import annotations

from typing import Any

from runtime.loading.gguf import GgufFile
from runtime.loading.gguf_configs import count, decoder_config, real, stored, table, tokens_config, value


def _gemma_config(file: GgufFile, full_every: int, layers_of_27b: int, window: int | None = None) -> dict[str, Any]:
    config = decoder_config(file)
    del config["hidden_act"]
    num_layers = config["num_hidden_layers"]
    # Queries are scaled by a head width that differs from the actual one in the 27B models.
    by_width = config["hidden_size"] // config["num_attention_heads"]
    layer_types = ["full_attention" if i % full_every == 0 else "sliding_attention" for i in range(1, num_layers + 1)]
    return config | {
        "query_pre_attn_scalar": by_width if num_layers == layers_of_27b else config["head_dim"],
        "sliding_window": count(file, "attention.sliding_window", window),
        "layer_types": layer_types,
    }


def gemma2_config(file: GgufFile) -> dict[str, Any]:
    return _gemma_config(file, full_every=2, layers_of_27b=46, window=4096) | {
        "attn_logit_softcapping": real(file, "attn_logit_softcapping", 50.0),
        "final_logit_softcapping": real(file, "final_logit_softcapping", 30.0),
    }


def gemma4_config(file: GgufFile) -> dict[str, Any]:
    num_layers, num_heads = (count(file, key) for key in ("block_count", "attention.head_count"))
    kinds = value(file, "attention.sliding_window_pattern", list)
    shared = value(file, "attention.shared_kv_layers", int, 0)
    kv_heads, ffn = (stored(file, key) for key in ("attention.head_count_kv", "feed_forward_length"))
    if not (isinstance(kv_heads, list) and len(kv_heads) >= num_layers == len(kinds)):
        kv_heads = [count(file, "attention.head_count_kv", num_heads)] * num_layers
    sliding = kinds.index(True) if True in kinds else 0
    widths = ffn if isinstance(ffn, list) and ffn else [count(file, "feed_forward_length")]
    partial = 1.0  # of each half of a head; the table divides the other frequencies by a huge number
    if "rope_freqs.weight" in file.tensors:
        partial = float((table(file, "rope_freqs.weight") < 1e20).mean())
    ropes = {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": partial,
                           "rope_theta": real(file, "rope.freq_base", 1e6)},
        "sliding_attention": {"rope_type": "default", "rope_theta": real(file, "rope.freq_base_swa", 1e4)},
    }  # fmt: skip
    config = {
        "hidden_size": count(file, "embedding_length"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": kv_heads[sliding],
        "num_global_key_value_heads": kv_heads[-1],
        "head_dim": count(file, "attention.key_length_swa"),
        "global_head_dim": count(file, "attention.key_length"),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in kinds],
        "sliding_window": count(file, "attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": f"blk.{num_layers - shared - 1}.attn_v.weight" not in file.tensors,
        "hidden_size_per_layer_input": value(file, "embedding_length_per_layer_input", int, 0),
        "rms_norm_eps": real(file, "attention.layer_norm_rms_epsilon"),
        "rope_parameters": ropes,
        "max_position_embeddings": count(file, "context_length"),
        **tokens_config(file),
    }
    config["vocab_size_per_layer_input"] = config["vocab_size"]
    if stored(file, "final_logit_softcapping") is not None:
        config["final_logit_softcapping"] = real(file, "final_logit_softcapping")
    if not value(file, "expert_count", int, 0):
        return config
    return config | {
        "enable_moe_block": True,
        "num_experts": count(file, "expert_count"),
        "top_k_experts": count(file, "expert_used_count"),
        "moe_intermediate_size": count(file, "expert_feed_forward_length"),
    }


def gemma3_config(file: GgufFile) -> dict[str, Any]:
    # RoPE's scaling applies to the layers with full attention.
    every = count(file, "attention.sliding_window_pattern", 6)
    return _gemma_config(file, full_every=every, layers_of_27b=62) | {
        "rope_theta": real(file, "rope.freq_base", 1e6),
        "rope_local_base_freq": real(file, "rope.freq_base_swa", 10000.0),
    }
