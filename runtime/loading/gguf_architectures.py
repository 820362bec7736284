"""The meaning of a GGUF file: its tensors under their Hugging Face names and order, and its metadata as a config.json.

GGUF has the same names for the tensors of all models (`_PARAMETERS`); Hugging Face's names are in the family's
WeightMap. An architecture is one entry of `ARCHITECTURES`: its family and its config. This module undoes the changes of
llama.cpp's converter (convert_hf_to_gguf.py) to the weights. Some values of a config.json are missing in GGUF because
llama.cpp has them in its code. So they are constants here too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.loading.gguf import GgufFile, GgufTensor, dequantize
from runtime.models import FAMILIES
from runtime.spec.types import CallboardError

_CONTROL = 3  # the type of a special token in a GGUF vocabulary (llama.h: llama_token_type)

# Special tokens that end a text or a turn, even without metadata (as in llama-vocab.cpp).
_END_TOKENS = {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"}
# GGUF's names, without the layer's prefix and the experts' suffix -> our parameters (DecoderSpec.shapes). A tensor of
# gate and up together has the name of up.
_PARAMETERS = {
    "token_embd": "embed", "position_embd": "positions", "output_norm": "final_norm", "output": "head",
    "attn_norm": "attn_norm", "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_qkv": "qkv", "attn_output": "out",
    "attn_q_norm": "q_norm", "attn_k_norm": "k_norm", "post_attention_norm": "post_attn_norm",
    "ffn_norm": "ffn_norm", "ffn_gate_inp": "router", "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down",
    "post_ffw_norm": "post_ffn_norm",
}  # fmt: skip
# Alternatives for families with a WeightMap that lacks the parameters above.
_OTHERWISE = {"post_attn_norm": "ffn_norm", "q_norm": "q_heads_norm", "k_norm": "k_heads_norm"}
_PARTLY_TURNED = {"phi3", "glm4"}  # architectures in which RoPE turns a part of each head
_PLAIN_TYPES = {"F64", "F32", "F16", "BF16"}  # of tensors that are not quantized
_EXPERTS = "_exps"  # ends the name of a tensor of all experts' weights
_ROPE_TABLES = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one value of `general.architecture` translates."""

    hf_class: str  # one of FAMILIES
    model_type: str  # in config.json
    config: Callable[[GgufFile], dict[str, Any]]  # the rest of it
    interleaved: bool = False  # the rows of q and k are in the order of interleaved RoPE pairs


@dataclass(frozen=True, slots=True)
class Source:
    """The place of the tensor with one HF name, and its differences there."""

    tensor: GgufTensor
    expert: int | None = None  # its index in a tensor of all experts
    interleaved_heads: int = 0
    plus_one: bool = False
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """As HF has it."""
        shape = self.tensor.shape if self.expert is None else self.tensor.shape[1:]
        return shape[::-1] if self.transposed else shape


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A GGUF file read as a model of a supported architecture."""

    file: GgufFile
    config: dict[str, Any]  # as config.json has it
    sources: dict[str, Source]  # by HF name

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of the tensor of this HF name, rows in HF's order: [num_rows, row_bytes]."""
        source = self.sources[name]
        raw = self.file.raw(source.tensor.name)
        if source.expert is not None:
            num_rows = len(raw) // source.tensor.shape[0]
            raw = raw[source.expert * num_rows : (source.expert + 1) * num_rows]
        if not (heads := source.interleaved_heads):
            return raw
        # Llama's GGUF pairs RoPE's rows (0,1)(2,3)..., HF's layout pairs (0,d/2)(1,d/2+1)...; blocks of quantised
        # weights lie within a row, so the rows move as bytes.
        rows = source.tensor.shape[0]
        if rows % (2 * heads):
            raise CallboardError(
                f"{self.file.path}: tensor {source.tensor.name!r} has {rows} rows, which make no {heads} even heads."
            )
        halves = raw.reshape(heads, rows // heads // 2, 2, -1)
        return halves.swapaxes(1, 2).reshape(raw.shape)


def read_gguf_model(file: GgufFile) -> GgufModel:
    """Translate names and metadata. Raises CallboardError for an unknown architecture or tensor."""
    arch_name = file.value("general.architecture", str)
    arch = ARCHITECTURES.get(arch_name)
    if arch is None:
        raise CallboardError(
            f"{file.path} is a {arch_name!r} model; of GGUF files these architectures are supported: "
            f"{', '.join(ARCHITECTURES)}."
        )
    if arch_name == "llama" and file.value("llama.expert_count", int, 0):
        arch = _MIXTRAL
    if arch_name == "olmo2" and "olmo2.attention.sliding_window" in file.metadata:
        arch = _OLMO_3
    if "token_embd.weight" not in file.tensors:
        raise CallboardError(f"{file.path} has no tensor 'token_embd.weight'; the file is incomplete.")
    sources: dict[str, Source] = {}
    for tensor in file.tensors.values():
        if tensor.name in _ROPE_TABLES:
            continue  # not a weight: RoPE's scaling as a table, which the config states
        try:
            sources |= _sources(file, arch_name, arch, tensor)
        except KeyError as e:
            what = f"tensor {tensor.name!r} is not one that a {arch_name!r} model has here"
            raise CallboardError(f"{file.path}: {what}.") from e
    config = {"architectures": [arch.hf_class], "model_type": arch.model_type, **arch.config(file)}
    types = {name: source.tensor.type_name for name, source in sources.items()}
    if quantized := {name: kind for name, kind in types.items() if kind not in _PLAIN_TYPES}:
        config["quantization_config"] = {"quant_method": "gguf", "types": quantized}
    return GgufModel(file, config, sources)


def _sources(file: GgufFile, arch_name: str, arch: Architecture, tensor: GgufTensor) -> dict[str, Source]:
    """Return the HF tensors in a GGUF tensor. Raises KeyError if the family's WeightMap lacks its name."""
    weight_map = FAMILIES[arch.hf_class].weight_map
    stem, _, kind = tensor.name.rpartition(".")
    block = re.match(r"blk\.(0|[1-9][0-9]{0,3})\.", stem)
    part = stem[block.end() :] if block else stem
    parameter = _PARAMETERS[part.removesuffix(_EXPERTS)]
    if f"gate_{parameter}" in weight_map.names:
        parameter = f"gate_{parameter}"
    if parameter not in weight_map.names:
        parameter = _OTHERWISE[parameter]
    name = weight_map.names[parameter]
    if not name.endswith(".weight"):
        name += f".{kind}"
    elif kind == "bias":
        name = weight_map.names[f"{parameter}_bias"]
    heads_key = {"q": "head_count", "k": "head_count_kv"}.get(parameter) if arch.interleaved else None
    source = Source(
        tensor,
        interleaved_heads=_count(file, f"{arch_name}.attention.{heads_key}") if heads_key else 0,
        plus_one=weight_map.norms_plus_one and parameter.endswith("norm"),
        transposed=weight_map.transposed and block is not None and len(tensor.shape) == 2,
    )
    is_of_experts = part.endswith(_EXPERTS)
    if name.count("{}") != (block is not None) + is_of_experts or is_of_experts != (len(tensor.shape) == 3):
        raise KeyError(tensor.name)
    layer = int(block[1]) if block else 0
    if not is_of_experts:
        return {name.format(layer): source}
    return {name.format(layer, i): Source(tensor, expert=i) for i in range(tensor.shape[0])}


def gguf_eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """The ids that end a text, a turn or a message, the model's own end-of-sequence id first."""
    keys = ("eos", "eot", "eom")
    ids = [file.value(f"tokenizer.ggml.{k}_token_id", int, -1) for k in keys]
    tokens, types = (file.value(f"tokenizer.ggml.{k}", list, []) for k in ("tokens", "token_type"))
    ids += [i for i, kind in enumerate(types[: len(tokens)]) if kind == _CONTROL and tokens[i] in _END_TOKENS]
    return tuple(dict.fromkeys(i for i in ids if i >= 0))


# ---- metadata -------------------------------------------------------------------------------------------------------


def _count(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.value(key, int, default)
    most = 1000 if key.endswith(".block_count") else 1 << 30
    if not 1 <= value <= most:
        raise CallboardError(f"{file.path}: {key} is {value}; it must be at least 1 and at most {most}.")
    return value


def _decimal(value: np.float32) -> float:
    """Its shortest decimal: 9.99999975e-06 was written as 1e-05."""
    return float(str(value))


def _real(file: GgufFile, key: str, default: float | None = None) -> float:
    """A float of the file, which has it as a float32."""
    value = _decimal(np.float32(file.value(key, float, default)))
    if not (math.isfinite(value) and value > 0):
        raise CallboardError(f"{file.path}: {key} is {value}; it must be a positive number.")
    return value


def _table(file: GgufFile, name: str) -> NDArray[np.float32]:
    return dequantize(file.raw(name), file.tensors[name].type_name).reshape(-1)


def _tokens_config(file: GgufFile) -> dict[str, Any]:
    return {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.value("tokenizer.ggml.bos_token_id", int, 1),
        "eos_token_id": list(gguf_eos_token_ids(file)),
    }


def _decoder_config(file: GgufFile) -> dict[str, Any]:
    """The fields that all architectures but GPT-2 have in common."""
    arch = file.value("general.architecture", str)
    num_heads = _count(file, f"{arch}.attention.head_count")
    hidden_size = _count(file, f"{arch}.embedding_length")
    rope_dim = _count(file, f"{arch}.rope.dimension_count", hidden_size // num_heads)
    head_dim = _count(file, f"{arch}.attention.key_length", rope_dim)
    if rope_dim != head_dim and f"{arch}.rope.dimension_count" in file.metadata and arch not in _PARTLY_TURNED:
        raise CallboardError(
            f"{file.path}: {arch}.rope.dimension_count is {rope_dim}, a part of a head's {head_dim}, which is not "
            f"supported of {arch}."
        )
    return {
        "hidden_size": hidden_size,
        "intermediate_size": _count(file, f"{arch}.feed_forward_length"),
        "num_hidden_layers": _count(file, f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _count(file, f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _real(file, f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": _real(file, f"{arch}.rope.freq_base", 10000.0),
        "max_position_embeddings": _count(file, f"{arch}.context_length"),
        **({"partial_rotary_factor": rope_dim / head_dim} if arch in _PARTLY_TURNED else {}),
        **_tokens_config(file),
        **_rope_scaling(file),
    }


def _rope_scaling(file: GgufFile) -> dict[str, Any]:
    """`rope_scaling` as config.json has it, in a dict of its own; empty if the metadata has none."""
    arch = file.value("general.architecture", str)
    kind = file.value(f"{arch}.rope.scaling.type", str, "none")
    match kind:
        case "none":
            return {}
        case "linear":
            scaling: dict[str, Any] = {"rope_type": "linear", "factor": _real(file, f"{arch}.rope.scaling.factor")}
        case "yarn":
            scaling = {
                "rope_type": "yarn",
                "factor": _real(file, f"{arch}.rope.scaling.factor"),
                "original_max_position_embeddings": _count(file, f"{arch}.rope.scaling.original_context_length"),
            }
            for name in ("beta_fast", "beta_slow"):
                if (key := f"{arch}.rope.scaling.yarn_{name}") in file.metadata:
                    scaling[name] = _real(file, key)
        case _:
            raise CallboardError(
                f"{file.path}: RoPE scaling {kind!r} is not supported from GGUF; linear, yarn and llama3 are."
            )
    return {"rope_scaling": scaling}


# ---- architectures --------------------------------------------------------------------------------------------------


def _llama_config(file: GgufFile) -> dict[str, Any]:
    config = _decoder_config(file)
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if "rope_scaling" not in config:
        config |= _llama3_rope_scaling(file, config["rope_theta"], config["head_dim"])
    return config


def _llama3_rope_scaling(file: GgufFile, rope_theta: float, rope_dim: int) -> dict[str, Any]:
    """`_rope_scaling` for Llama 3.1, stored as the resulting table of divisors.

    The only free parameter of the released models is the factor, which is the table's largest entry. The table computed
    from it must equal the table in the file."""
    if "rope_freqs.weight" not in file.tensors:
        return {}
    divisors = _table(file, "rope_freqs.weight")
    factor, original, low, high = float(divisors.max()), 8192, 1.0, 4.0
    if factor == 1.0:
        return {}
    not_llama3 = CallboardError(f"{file.path}: the table in rope_freqs.weight is not Llama 3's RoPE scaling.")
    if len(divisors) != -(-rope_dim // 2):  # checked before arrays of this size are allocated
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


def _mixtral_config(file: GgufFile) -> dict[str, Any]:
    return _llama_config(file) | {
        "num_local_experts": _count(file, "llama.expert_count"),
        "num_experts_per_tok": _count(file, "llama.expert_used_count"),
    }


def _granite_config(file: GgufFile) -> dict[str, Any]:
    config = _llama_config(file)
    return config | {
        "attention_multiplier": _real(file, "granite.attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": _real(file, "granite.embedding_scale", 1.0),
        "residual_multiplier": _real(file, "granite.residual_scale", 1.0),
        "logits_scaling": _real(file, "granite.logit_scale", 1.0),
    }


def _seed_oss_config(file: GgufFile) -> dict[str, Any]:
    return _llama_config(file) | {"attention_out_bias": "blk.0.attn_output.bias" in file.tensors}


def _mistral3_config(file: GgufFile) -> dict[str, Any]:
    config = _llama_config(file)
    if scaling := config.get("rope_scaling"):
        scaling["llama_4_scaling_beta"] = _decimal(
            np.float32(file.value("mistral3.attention.temperature_scale", float, 0.0))
        )
        if "mistral3.rope.scaling.yarn_log_multiplier" in file.metadata:
            scaling["mscale"] = 1.0
            scaling["mscale_all_dim"] = _real(file, "mistral3.rope.scaling.yarn_log_multiplier")
    return config


def _olmo2_config(file: GgufFile) -> dict[str, Any]:
    config = _llama_config(file)
    if "rope_scaling" in config and "olmo2.rope.scaling.attn_factor" in file.metadata:
        config["rope_scaling"]["attention_factor"] = _real(file, "olmo2.rope.scaling.attn_factor")
    return config


def _olmo3_config(file: GgufFile) -> dict[str, Any]:
    kinds = file.value("olmo2.attention.sliding_window_pattern", list)
    return _olmo2_config(file) | {
        "sliding_window": _count(file, "olmo2.attention.sliding_window"),
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in kinds],
    }


def _qwen3moe_config(file: GgufFile) -> dict[str, Any]:
    return _decoder_config(file) | {
        "num_experts": _count(file, "qwen3moe.expert_count"),
        "num_experts_per_tok": _count(file, "qwen3moe.expert_used_count"),
        "moe_intermediate_size": _count(file, "qwen3moe.expert_feed_forward_length"),
        "norm_topk_prob": True,  # of all released models
    }


def _gemma_config(file: GgufFile, full_every: int, layers_of_27b: int) -> dict[str, Any]:
    config = _decoder_config(file)
    del config["hidden_act"]
    num_layers = config["num_hidden_layers"]
    # Queries are scaled by a head width that differs from the actual one in the 27B models.
    by_width = config["hidden_size"] // config["num_attention_heads"]
    layer_types = ["full_attention" if i % full_every == 0 else "sliding_attention" for i in range(1, num_layers + 1)]
    return config | {
        "query_pre_attn_scalar": by_width if num_layers == layers_of_27b else config["head_dim"],
        "sliding_window": _count(file, f"{file.value('general.architecture', str)}.attention.sliding_window"),
        "layer_types": layer_types,
    }


def _gemma2_config(file: GgufFile) -> dict[str, Any]:
    return _gemma_config(file, full_every=2, layers_of_27b=46) | {
        "attn_logit_softcapping": _real(file, "gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": _real(file, "gemma2.final_logit_softcapping", 30.0),
    }


def _gemma3_config(file: GgufFile) -> dict[str, Any]:
    # RoPE's scaling applies to the layers with full attention.
    every = _count(file, "gemma3.attention.sliding_window_pattern", 6)
    return _gemma_config(file, full_every=every, layers_of_27b=62) | {
        "rope_theta": _real(file, "gemma3.rope.freq_base", 1e6),
        "rope_local_base_freq": _real(file, "gemma3.rope.freq_base_swa", 10000.0),
    }


def _phi3_config(file: GgufFile) -> dict[str, Any]:
    config = _decoder_config(file)
    config["sliding_window"] = file.value("phi3.attention.sliding_window", int, 0) or None
    if "rope_factors_long.weight" in file.tensors and "rope_factors_short.weight" in file.tensors:
        original = _count(file, "phi3.rope.scaling.original_context_length")
        factors = {
            f"{n}_factor": [_decimal(x) for x in _table(file, f"rope_factors_{n}.weight")] for n in ("long", "short")
        }
        config["original_max_position_embeddings"] = original
        config["rope_scaling"] = {"rope_type": "longrope", **factors, "original_max_position_embeddings": original}
    return config


def _gpt2_config(file: GgufFile) -> dict[str, Any]:
    return {
        "n_embd": _count(file, "gpt2.embedding_length"),
        "n_inner": _count(file, "gpt2.feed_forward_length"),
        "n_layer": _count(file, "gpt2.block_count"),
        "n_head": _count(file, "gpt2.attention.head_count"),
        "n_positions": _count(file, "gpt2.context_length"),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": _real(file, "gpt2.attention.layer_norm_epsilon"),
        **_tokens_config(file),
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", _llama_config, interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", _decoder_config),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", _decoder_config),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _qwen3moe_config),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", _gemma2_config),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", _gemma3_config),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", _phi3_config),
    "gpt2": Architecture("GPT2LMHeadModel", "gpt2", _gpt2_config),
    "glm4": Architecture("Glm4ForCausalLM", "glm4", _llama_config),
    "granite": Architecture("GraniteForCausalLM", "granite", _granite_config, interleaved=True),
    "mistral3": Architecture("Ministral3ForCausalLM", "ministral3", _mistral3_config, interleaved=True),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", _olmo2_config),
    "seed_oss": Architecture("SeedOssForCausalLM", "seed_oss", _seed_oss_config),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", _llama_config, interleaved=True),
}
_OLMO_3 = Architecture("Olmo3ForCausalLM", "olmo3", _olmo3_config)  # an olmo2 file with windows
_MIXTRAL = Architecture("MixtralForCausalLM", "mixtral", _mixtral_config, interleaved=True)  # a llama file with experts
