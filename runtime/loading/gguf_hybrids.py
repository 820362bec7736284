"""The metadata of a GGUF file as a config.json, for architectures with recurrent states."""

from __future__ import annotations

from typing import Any

from runtime.loading.gguf import GgufFile
from runtime.loading.gguf_configs import count, decoder_config
from runtime.spec.types import CallboardError


def _delta_rule_config(file: GgufFile) -> dict[str, Any]:
    """The fields of models with the gated delta rule."""
    config, arch = decoder_config(file), file.value("general.architecture", str)
    num_layers = config["num_hidden_layers"] - file.value(f"{arch}.nextn_predict_layers", int, 0)
    value_heads, inner = count(file, f"{arch}.ssm.time_step_rank"), count(file, f"{arch}.ssm.inner_size")
    if inner % value_heads:
        raise CallboardError(f"{file.path}: {arch}.ssm.inner_size is {inner}, which makes no {value_heads} even heads.")
    stateful = [f"blk.{i}.ssm_out.weight" in file.tensors for i in range(num_layers)]
    return config | {
        "num_hidden_layers": num_layers,
        "layer_types": ["linear_attention" if has_state else "full_attention" for has_state in stateful],
        "linear_num_key_heads": count(file, f"{arch}.ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": count(file, f"{arch}.ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": count(file, f"{arch}.ssm.conv_kernel"),
    }


def _shared_experts_config(file: GgufFile) -> dict[str, Any]:
    arch = file.value("general.architecture", str)
    size = count(file, f"{arch}.expert_feed_forward_length")
    return {
        "num_experts": count(file, f"{arch}.expert_count"),
        "num_experts_per_tok": count(file, f"{arch}.expert_used_count"),
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": count(file, f"{arch}.expert_shared_feed_forward_length", size),
    }


def qwen35_config(file: GgufFile) -> dict[str, Any]:
    return _delta_rule_config(file) | {"linear_heads_tiled": True}


def qwen35moe_config(file: GgufFile) -> dict[str, Any]:
    return qwen35_config(file) | _shared_experts_config(file)


def qwen3next_config(file: GgufFile) -> dict[str, Any]:
    return _delta_rule_config(file) | _shared_experts_config(file) | {"linear_maps_by_key_head": False}


def lfm2_config(file: GgufFile) -> dict[str, Any]:
    config, arch = decoder_config(file), file.value("general.architecture", str)
    convs = [f"blk.{i}.shortconv.conv.weight" in file.tensors for i in range(config["num_hidden_layers"])]
    return config | {
        "norm_eps": config["rms_norm_eps"],
        "layer_types": ["conv" if is_conv else "full_attention" for is_conv in convs],
        "conv_L_cache": count(file, f"{arch}.shortconv.l_cache"),
        "conv_bias": any(name.endswith(".shortconv.conv.bias") for name in file.tensors),
        "block_auto_adjust_ff_dim": False,  # the file has the adjusted size
    }


def lfm2moe_config(file: GgufFile) -> dict[str, Any]:
    return lfm2_config(file) | {
        "num_experts": count(file, "lfm2moe.expert_count"),
        "num_experts_per_tok": count(file, "lfm2moe.expert_used_count"),
        "moe_intermediate_size": count(file, "lfm2moe.expert_feed_forward_length"),
        "num_dense_layers": file.value("lfm2moe.leading_dense_block_count", int, 0),
        "use_expert_bias": any(".exp_probs_b" in name for name in file.tensors),
        "norm_topk_prob": True,  # of all released models
    }
