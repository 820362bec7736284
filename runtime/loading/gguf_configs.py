"""The metadata of a GGUF file as a config.json, for each architecture."""

from __future__ import annotations

import math
import re
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.base.types import CallboardError
from runtime.loading.gguf import GgufFile, dequantize

T = TypeVar("T")
_CONTROL = 3  # the type of a special token in a GGUF vocabulary (llama.h: llama_token_type).
# Special tokens that end a text or a turn, even without metadata (as in llama-vocab.cpp).
_END_TOKENS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<turn|>"}
_HARMONY_END_TOKENS = {"<|return|>", "<|call|>", "<|endoftext|>"}  # here <|end|> ends one message among several
# Architectures in which RoPE turns a part of each head
_PARTLY_TURNED = {"phi3", "deepseek2", "glm4", "glm4moe", "qwen35", "qwen35moe", "qwen3next"}


def gguf_eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """The ids that end a text, a turn or a message, the model's own end-of-sequence id first."""
    keys = ("eos", "eot", "eom")
    ids = [file.value(f"tokenizer.ggml.{k}_token_id", int, -1) for k in keys]
    tokens, types = (file.value(f"tokenizer.ggml.{k}", list, []) for k in ("tokens", "token_type"))
    controls = {tokens[i]: i for i, kind in enumerate(types[: len(tokens)]) if kind == _CONTROL}
    ends = _HARMONY_END_TOKENS if controls.keys() >= _HARMONY_END_TOKENS else _END_TOKENS
    ids += [i for token, i in controls.items() if token in ends]
    return tuple(dict.fromkeys(i for i in ids if i >= 0))


def _arch(file: GgufFile) -> str:
    return file.value("general.architecture", str)


def stored(file: GgufFile, key: str) -> Any:
    """An architecture key's value, of any type; None without it."""
    return file.metadata.get(f"{_arch(file)}.{key}")


def value(file: GgufFile, key: str, kind: type[T], default: T | None = None) -> T:
    """`GgufFile.value` of an architecture key."""
    return file.value(f"{_arch(file)}.{key}", kind, default)


def count(file: GgufFile, key: str, default: int | None = None) -> int:
    found, most = value(file, key, int, default), 1000 if key == "block_count" else 1 << 30
    if not 1 <= found <= most:
        raise CallboardError(f"{file.path}: {_arch(file)}.{key} is {found}; it must be at least 1 and at most {most}.")
    return found


def _decimal(number: np.float32) -> float:
    """Its shortest decimal: 9.99999975e-06 was written as 1e-05."""
    return float(str(number))


def real(file: GgufFile, key: str, default: float | None = None) -> float:
    """A float of the file, which has it as a float32."""
    found = _decimal(np.float32(value(file, key, float, default)))
    if not (math.isfinite(found) and found > 0):
        raise CallboardError(f"{file.path}: {_arch(file)}.{key} is {found}; it must be a positive number.")
    return found


def table(file: GgufFile, name: str) -> NDArray[np.float32]:
    file.read_tables.add(name)
    return dequantize(file.raw(name), file.tensors[name].type_name).reshape(-1)


def tokens_config(file: GgufFile) -> dict[str, Any]:
    return {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id", int, 1),
        "eos_token_id": list(gguf_eos_token_ids(file)),
    }


def decoder_config(file: GgufFile) -> dict[str, Any]:
    """The fields that all architectures but GPT-2 have in common."""
    arch, num_heads = _arch(file), count(file, "attention.head_count")
    hidden_size = count(file, "embedding_length")
    num_drafting = value(file, "nextn_predict_layers", int, 0)
    head_dim = count(file, "attention.key_length", hidden_size // num_heads)
    rope_dim = count(file, "rope.dimension_count", head_dim)
    if rope_dim != head_dim and arch not in _PARTLY_TURNED:
        raise CallboardError(
            f"{file.path}: {arch}.rope.dimension_count is {rope_dim}, a part of a head's {head_dim}, which is not "
            f"supported of {arch}."
        )
    return {
        "hidden_size": hidden_size,
        "intermediate_size": count(file, "feed_forward_length", stored(file, "expert_feed_forward_length")),
        "num_hidden_layers": count(file, "block_count") - num_drafting,
        "num_nextn_predict_layers": num_drafting,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _kv_heads(file, num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": real(file, "attention.layer_norm_rms_epsilon"),
        "rope_theta": real(file, "rope.freq_base", 10000.0),
        "max_position_embeddings": count(file, "context_length"),
        **({"partial_rotary_factor": rope_dim / head_dim} if arch in _PARTLY_TURNED else {}),
        **tokens_config(file),
        **_rope_scaling(file),
    } | _sections(file)


def _sections(file: GgufFile) -> dict[str, Any]:
    """Rotary positions of images, if the file has them."""
    sections = [int(size) for size in stored(file, "rope.dimension_sections") or ()][:3]
    scaling = _rope_scaling(file).get("rope_scaling")
    if not any(sections):
        return {}
    parameters = {"mrope_section": sections, "mrope_interleaved": not _arch(file).startswith("glm4")}
    return {"rope_scaling": (scaling or {}) | parameters, "rope_interleave": False}  # converters reorder GLM-4's pairs


def _kv_heads(file: GgufFile, default: int) -> int:
    """The heads of keys and values; a file may have a number for each layer, which is 0 without attention."""
    key = "attention.head_count_kv"
    if not isinstance(found := stored(file, key), list):
        return count(file, key, default)
    numbers = {number for number in found if number}
    if len(numbers) != 1 or not isinstance(most := numbers.pop(), int) or not 1 <= most < 1 << 16:
        raise CallboardError(
            f"{file.path}: {_arch(file)}.{key} differs among layers with attention, which is not supported."
        )
    return most


def _rope_scaling(file: GgufFile) -> dict[str, Any]:
    """`rope_scaling` as config.json has it, in a dict of its own. As in llama.cpp, its type is linear by default."""
    kind = value(file, "rope.scaling.type", str, "linear")
    old_key = "rope.scale_linear"
    factor = real(file, "rope.scaling.factor", 1.0 if stored(file, old_key) is None else real(file, old_key))
    scaling: dict[str, Any] = {"rope_type": "default"}  # stated, since a config class may have another default
    match kind:
        case "none":
            pass
        case "linear" if factor == 1.0:
            pass
        case "linear":
            scaling = {"rope_type": "linear", "factor": factor}
        case "yarn":
            context = count(file, "context_length")
            original = count(file, "rope.scaling.original_context_length", context)
            scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            for name in ("beta_fast", "beta_slow"):
                if stored(file, f"rope.scaling.yarn_{name}") is not None:
                    scaling[name] = real(file, f"rope.scaling.yarn_{name}")
        case _:
            raise CallboardError(
                f"{file.path}: RoPE scaling {kind!r} is not supported from GGUF; linear, yarn and llama3 are."
            )
    return {"rope_scaling": scaling}


def llama_config(file: GgufFile) -> dict[str, Any]:
    config = decoder_config(file)
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["stored_out_bias"] = "blk.0.attn_output.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if config["rope_scaling"]["rope_type"] == "default":
        config |= _llama3_rope_scaling(file, config["rope_theta"], config["head_dim"])
    return config


def _llama3_rope_scaling(file: GgufFile, rope_theta: float, rope_dim: int) -> dict[str, Any]:
    """`_rope_scaling` for Llama 3.1, stored as the resulting divisor table.

    The released models' only free parameter is the factor, which is the table's largest entry. The table computed
    from it must equal the table in the file."""
    if "rope_freqs.weight" not in file.tensors:
        return {}
    divisors = table(file, "rope_freqs.weight")
    factor, original, low, high = float(divisors.max()), 8192, 1.0, 4.0
    if factor == 1.0:
        return {}
    not_llama3 = CallboardError(f"{file.path}: the table in rope_freqs.weight is not Llama 3's RoPE scaling.")
    if len(divisors) != -(-rope_dim // 2):  # checked before such arrays are allocated
        raise not_llama3
    turns = original * rope_theta ** -(np.arange(0, rope_dim, 2) / rope_dim) / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(divisors, expected, rtol=1e-3):
        raise not_llama3
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    return {"rope_scaling": scaling}


def _experts(file: GgufFile, count_key: str = "num_experts") -> dict[str, Any]:
    return {count_key: count(file, "expert_count"), "num_experts_per_tok": count(file, "expert_used_count")}


def mixtral_config(file: GgufFile) -> dict[str, Any]:
    return llama_config(file) | _experts(file, "num_local_experts")


def gpt_oss_config(file: GgufFile) -> dict[str, Any]:
    config = decoder_config(file)
    if config["rope_scaling"]["rope_type"] == "yarn":
        config["rope_scaling"]["truncate"] = False  # all released models' value
    return config | {
        **_experts(file, "num_local_experts"),
        "intermediate_size": count(file, "expert_feed_forward_length", config["intermediate_size"]),
        "sliding_window": count(file, "attention.sliding_window"),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
    }


def granite_config(file: GgufFile) -> dict[str, Any]:
    config = llama_config(file)
    return config | {
        "attention_multiplier": real(file, "attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": real(file, "embedding_scale", 1.0),
        "residual_multiplier": real(file, "residual_scale", 1.0),
        "logits_scaling": real(file, "logit_scale", 1.0),
    }


def granitemoe_config(file: GgufFile) -> dict[str, Any]:
    return granite_config(file) | _experts(file, "num_local_experts")


def seed_oss_config(file: GgufFile) -> dict[str, Any]:
    return llama_config(file) | {"attention_out_bias": "blk.0.attn_output.bias" in file.tensors}


def mistral3_config(file: GgufFile) -> dict[str, Any]:
    config = llama_config(file)
    if (scaling := config["rope_scaling"])["rope_type"] == "yarn":
        scaling["llama_4_scaling_beta"] = _decimal(np.float32(value(file, "attention.temperature_scale", float, 0.0)))
        if stored(file, "rope.scaling.yarn_log_multiplier") is not None:
            scaling["mscale"] = 1.0
            scaling["mscale_all_dim"] = real(file, "rope.scaling.yarn_log_multiplier")
    return config


def olmo2_config(file: GgufFile) -> dict[str, Any]:
    config = llama_config(file)
    if config["rope_scaling"]["rope_type"] == "yarn" and stored(file, "rope.scaling.attn_factor") is not None:
        config["rope_scaling"]["attention_factor"] = real(file, "rope.scaling.attn_factor")
    return config


def olmo3_config(file: GgufFile) -> dict[str, Any]:
    kinds = value(file, "attention.sliding_window_pattern", list)
    return olmo2_config(file) | {
        "sliding_window": count(file, "attention.sliding_window"),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in kinds],
    }


def _expert_size(file: GgufFile) -> int:
    """The size of one expert's feed-forward layer: by default, a token's experts share the stated size."""
    used = count(file, "expert_used_count")
    stated = stored(file, "feed_forward_length")
    return count(file, "expert_feed_forward_length", stated // used if type(stated) is int else None)


def qwen3moe_config(file: GgufFile) -> dict[str, Any]:
    return decoder_config(file) | {
        **_experts(file),
        "moe_intermediate_size": _expert_size(file),
        "norm_topk_prob": True,  # all released models' value
    }


def qwen2moe_config(file: GgufFile) -> dict[str, Any]:
    if (name := "blk.0.ffn_gate_shexp.weight") not in file.tensors:
        raise CallboardError(f"{file.path} has no tensor {name!r}; the file is incomplete.")
    return decoder_config(file) | {
        **_experts(file),
        "moe_intermediate_size": _expert_size(file),
        "shared_expert_intermediate_size": file.tensors[name].shape[0],  # older files do not state it
        "norm_topk_prob": False,  # all released models' value
    }


def olmoe_config(file: GgufFile) -> dict[str, Any]:
    return decoder_config(file) | _experts(file) | {"norm_topk_prob": False}  # all released models' value


def glm4moe_config(file: GgufFile) -> dict[str, Any]:
    return decoder_config(file) | {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        **_grouped_experts_config(file),
    }


def deepseek2_config(file: GgufFile) -> dict[str, Any]:
    config = decoder_config(file)
    del config["partial_rotary_factor"], config["head_dim"], config["num_key_value_heads"]
    rope_dim = count(file, "rope.dimension_count")
    # Newer files state a head's sizes by their own keys, as key_length is the cache's.
    end = "" if stored(file, "attention.key_length_mla") is None else "_mla"
    head_dim, value_dim = (count(file, f"attention.{n}_length{end}") for n in ("key", "value"))
    if (scaling := config["rope_scaling"])["rope_type"] == "yarn":
        # This architecture's converter multiplies by 0.1.
        factor = value(file, "rope.scaling.yarn_log_multiplier", float, 0.0)
        scaling["mscale"] = scaling["mscale_all_dim"] = _decimal(np.float32(factor * 10))
    experts: dict[str, Any] = {"n_routed_experts": 0}
    if value(file, "expert_count", int, 0):
        experts = _grouped_experts_config(file)
    if experts["n_routed_experts"] and value(file, "expert_gating_func", int, 1) != 2:
        experts["topk_method"] = "group_limited_greedy" if experts["n_group"] > 1 else "greedy"
    return config | {
        "kv_lora_rank": count(file, "attention.kv_lora_rank"),
        "q_lora_rank": value(file, "attention.q_lora_rank", int, 0) or None,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": head_dim - rope_dim,
        "v_head_dim": value_dim,
        "kv_b_is_split": "blk.0.attn_k_b.weight" in file.tensors,
        **experts,
    }


def _grouped_experts_config(file: GgufFile) -> dict[str, Any]:
    """The fields for mixtures with expert groups, a choice bias and dense first layers."""
    return {
        **_experts(file, "n_routed_experts"),
        "moe_intermediate_size": count(file, "expert_feed_forward_length"),
        "n_shared_experts": value(file, "expert_shared_count", int, 0),
        "first_k_dense_replace": value(file, "leading_dense_block_count", int, 0),
        "norm_topk_prob": value(file, "expert_weights_norm", bool, False),
        "routed_scaling_factor": real(file, "expert_weights_scale", 1.0),
        "n_group": count(file, "expert_group_count", 1),
        "topk_group": count(file, "expert_group_used_count", 1),
    }


def phi3_config(file: GgufFile) -> dict[str, Any]:
    config = decoder_config(file)
    config["sliding_window"] = value(file, "attention.sliding_window", int, 0) or None
    if "rope_factors_long.weight" in file.tensors and "rope_factors_short.weight" in file.tensors:
        context = config["max_position_embeddings"]
        original = count(file, "rope.scaling.original_context_length", context)
        factors = {
            f"{n}_factor": [_decimal(x) for x in table(file, f"rope_factors_{n}.weight")] for n in ("long", "short")
        }
        config["original_max_position_embeddings"] = original
        config["rope_scaling"] = {"rope_type": "longrope", **factors, "original_max_position_embeddings": original}
    return config


def gpt2_config(file: GgufFile) -> dict[str, Any]:
    return {
        "n_embd": count(file, "embedding_length"),
        "n_inner": count(file, "feed_forward_length"),
        "n_layer": count(file, "block_count"),
        "n_head": count(file, "attention.head_count"),
        "n_positions": count(file, "context_length"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": real(file, "attention.layer_norm_epsilon"),
        **tokens_config(file),
    }


def _delta_rule_config(file: GgufFile) -> dict[str, Any]:
    """The fields of models with the gated delta rule."""
    config = decoder_config(file)
    num_layers = config["num_hidden_layers"]
    value_heads, inner = count(file, "ssm.time_step_rank"), count(file, "ssm.inner_size")
    if inner % value_heads:
        raise CallboardError(
            f"{file.path}: {_arch(file)}.ssm.inner_size is {inner}, which makes no {value_heads} even heads."
        )
    stateful = [f"blk.{i}.ssm_out.weight" in file.tensors for i in range(num_layers)]
    return config | {
        "layer_types": ["linear_attention" if has_state else "full_attention" for has_state in stateful],
        "linear_num_key_heads": count(file, "ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": count(file, "ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": count(file, "ssm.conv_kernel"),
    }


def drafts_tokens(file: GgufFile, name: str) -> bool:
    """Return True for a tensor of the layers that draft tokens, which are the last ones."""
    block = re.match(r"blk\.(\d{1,4})\.", name)
    num_drafting = value(file, "nextn_predict_layers", int, 0)
    return block is not None and num_drafting > 0 and int(block[1]) >= count(file, "block_count") - num_drafting


def _shared_experts_config(file: GgufFile) -> dict[str, Any]:
    size = count(file, "expert_feed_forward_length")
    return {
        **_experts(file),
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": count(file, "expert_shared_feed_forward_length", size),
    }


def qwen35_config(file: GgufFile) -> dict[str, Any]:
    return _delta_rule_config(file) | {"linear_heads_tiled": True}


def qwen35moe_config(file: GgufFile) -> dict[str, Any]:
    return qwen35_config(file) | _shared_experts_config(file)


def qwen3next_config(file: GgufFile) -> dict[str, Any]:
    return _delta_rule_config(file) | _shared_experts_config(file) | {"linear_maps_by_key_head": False}


def lfm2_config(file: GgufFile) -> dict[str, Any]:
    config = decoder_config(file)
    convs = [f"blk.{i}.shortconv.conv.weight" in file.tensors for i in range(config["num_hidden_layers"])]
    return config | {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["conv" if is_conv else "full_attention" for is_conv in convs],
        "conv_L_cache": count(file, "shortconv.l_cache"),
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in file.tensors),
        "block_auto_adjust_ff_dim": False,  # the file has the adjusted size
    }


def lfm2moe_config(file: GgufFile) -> dict[str, Any]:
    return lfm2_config(file) | {
        **_experts(file),
        "moe_intermediate_size": count(file, "expert_feed_forward_length"),
        "num_dense_layers": value(file, "leading_dense_block_count", int, 0),
        "use_expert_bias": any(".exp_probs_b" in name for name in file.tensors),
        "norm_topk_prob": True,  # all released models' value
    }
