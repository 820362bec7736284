"""The meaning of a GGUF file: its tensors under their Hugging Face names and order, and its metadata as a config.json.

GGUF has the same tensor names for all models (`_PARAMETERS`); Hugging Face's names are in the family's
WeightMap. An architecture is one entry in `ARCHITECTURES`: its family and its config (`gguf_configs.py`). This module
undoes the changes that llama.cpp's converter (convert_hf_to_gguf.py) makes to weights. One change remains, because
quantized blocks cannot undo it: the order of Qwen3.5's value heads (`DeltaRuleSpec.tiled`)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runtime.base.types import CallboardError
from runtime.loading import gguf_configs as configs
from runtime.loading import gguf_gemma
from runtime.loading.gguf import GgufFile, GgufTensor
from runtime.models import FAMILIES
from runtime.models.heads.names import GGUF_PARTS, copies_of, head_map
from runtime.models.weight_map import WeightMap

# GGUF's names, without the layer's prefix and the experts' suffix -> our parameters (DecoderSpec.shapes). A tensor with
# gate and up together has up's name.
_PARAMETERS = {
    "token_embd": "embed", "position_embd": "positions", "output_norm": "final_norm", "output": "head",
    "attn_norm": "attn_norm", "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_qkv": "qkv", "attn_output": "out",
    "attn_q_norm": "q_norm", "attn_k_norm": "k_norm", "post_attention_norm": "post_attn_norm",
    "attn_sinks": "sinks",
    "ffn_norm": "ffn_norm", "ffn_gate_inp": "router", "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down",
    "post_ffw_norm": "post_ffn_norm",
    "attn_gate": "mix_z", "ssm_alpha": "mix_a", "ssm_beta": "mix_b", "ssm_out": "mix_out", "ssm_norm": "mix_norm",
    "ssm_a": "decay_log", "ssm_dt": "decay_bias", "ssm_conv1d": "conv",
    "shortconv.in_proj": "mix_in", "shortconv.out_proj": "mix_out", "shortconv.conv": "conv",
    "attn_q_a": "q_a", "attn_q_a_norm": "q_a_norm", "attn_q_b": "q_b", "attn_kv_a_mqa": "kv_a",
    "attn_kv_a_norm": "kv_a_norm", "attn_kv_b": "kv_b", "attn_k_b": "k_b", "attn_v_b": "v_b",
    "token_embd_norm": "final_norm", "exp_probs_b": "choice_bias", "ffn_gate_inp_shexp": "shared_gate",
    "per_layer_token_embd": "layer_embed", "per_layer_model_proj": "layer_embed_map",
    "per_layer_proj_norm": "layer_embed_norm", "inp_gate": "layer_gate", "proj": "layer_out",
    "post_norm": "post_layer_norm", "layer_output_scale": "factor", "pre_ffw_norm_2": "experts_norm",
    "post_ffw_norm_1": "post_dense_norm", "post_ffw_norm_2": "post_experts_norm",
    "ffn_gate_inp.scale": "router_norm", "ffn_down_exps.scale": "expert_scales",
    "ffn_gate_shexp": "shared.gate", "ffn_up_shexp": "shared.up", "ffn_down_shexp": "shared.down",
}  # fmt: skip
# Alternatives for families with a WeightMap that lacks the parameters above.
_OTHERWISE = {
    "post_attn_norm": "ffn_norm", "q_norm": "q_heads_norm", "k_norm": "k_heads_norm", "q": "gated_q", "qkv": "mix_qkv",
}  # fmt: skip
# Tensors with two parameters' rows, which alternate by key head or are each expert's halves
_PAIRS = {"ssm_ba": ("mix_b", "mix_a"), "ffn_gate_up_exps": ("gate", "up")}
# Parameters with names that no .weight or .bias follows
_WHOLE_NAMES = {"decay_log", "decay_bias", "choice_bias", "sinks", "factor", "router_norm", "expert_scales"}
_PLAIN_TYPES = {"F64", "F32", "F16", "BF16"}  # types of tensors that are not quantized
_NEXTN = re.compile(r"blk\.\d+\.nextn\.(\w+)\.weight")
_EXPERTS = "_exps"  # ends the name of a tensor with all experts' weights


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one value of `general.architecture` translates."""

    hf_class: str  # one of FAMILIES
    model_type: str  # value in config.json
    config: Callable[[GgufFile], dict[str, Any]]  # the rest of config.json
    interleaved: bool = False  # q and k rows are in the order of interleaved RoPE pairs


@dataclass(frozen=True, slots=True)
class Source:
    """The place of the tensor with one HF name, and its differences there."""

    tensor: GgufTensor
    expert: int | None = None  # its index in a tensor with all experts
    interleaved_heads: int = 0
    plus_one: bool = False
    transposed: bool = False
    is_decay: bool = False  # stored is -exp of HF's number
    half: tuple[int, int] | None = None  # its rows are the first or second half of each of a number of groups
    viewed: tuple[int, ...] = ()  # HF's shape, if it has a dimension of 1 more

    @property
    def shape(self) -> tuple[int, ...]:
        """As HF has it."""
        if self.viewed:
            return self.viewed
        shape = self.tensor.shape if self.expert is None else self.tensor.shape[1:]
        if self.half is not None:
            shape = (shape[0] // 2, *shape[1:])
        return shape[::-1] if self.transposed else shape


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A GGUF file read as a model of a supported architecture."""

    file: GgufFile
    config: dict[str, Any]  # config.json's content
    sources: dict[str, Source]  # sources by HF name

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of the tensor with this HF name, rows in HF's order: [num_rows, row_bytes]."""
        source = self.sources[name]
        raw = self.file.raw(source.tensor.name)
        if source.expert is not None:
            num_rows = len(raw) // source.tensor.shape[0]
            raw = raw[source.expert * num_rows : (source.expert + 1) * num_rows]
        if source.half is not None:
            num_groups, which = source.half
            raw = raw.reshape(num_groups, 2, -1, raw.shape[1])[:, which].reshape(-1, raw.shape[1])
        if not (heads := source.interleaved_heads):
            return raw
        # Llama's GGUF pairs RoPE's rows (0,1)(2,3)..., HF's layout pairs (0,d/2)(1,d/2+1)...; quantised blocks
        # lie within a row, so the rows move as bytes.
        rows = source.tensor.shape[0]
        if rows % (2 * heads):
            raise CallboardError(
                f"{self.file.path}: tensor {source.tensor.name!r} has {rows} rows, which make no {heads} even heads."
            )
        halves = raw.reshape(heads, rows // heads // 2, 2, -1)
        return halves.swapaxes(1, 2).reshape(raw.shape)


_HEADS = ("eagle", "eagle3", "dflash", "gemma4-assistant", "gemma4_assistant")  # which draft tokens for a model


def read_gguf_model(file: GgufFile) -> GgufModel:
    """Translate names and metadata. Raises CallboardError for an unknown architecture."""
    arch_name = file.value("general.architecture", str)
    arch = ARCHITECTURES.get(arch_name)
    if arch is None and arch_name in _HEADS:
        raise CallboardError(
            f"{file.path} is a draft head ({arch_name}), which is not read from GGUF files; give a folder of "
            "safetensors files with the head as draft."
        )
    if arch is None:
        raise CallboardError(
            f"{file.path} is a {arch_name!r} model; of GGUF files these architectures are supported: "
            f"{', '.join(ARCHITECTURES)}."
        )
    if arch_name == "llama" and file.value("llama.expert_count", int, 0):
        arch = _MIXTRAL
    if arch_name == "olmo2" and "olmo2.attention.sliding_window" in file.metadata:
        arch = _OLMO_3
    if arch_name == "deepseek2" and file.value("deepseek2.expert_gating_func", int, 1) == 2:
        arch = _DEEPSEEK_3
    if "token_embd.weight" not in file.tensors:
        raise CallboardError(f"{file.path} has no tensor 'token_embd.weight'; the file is incomplete.")
    sources: dict[str, Source] = {}
    config = {"architectures": [arch.hf_class], "model_type": arch.model_type, **arch.config(file)}
    for tensor in file.tensors.values():
        if tensor.name in file.read_tables:
            continue
        own = _sources(config, arch, tensor, configs.drafts_tokens(file, tensor.name))
        sources |= own or {tensor.name: Source(tensor)}  # unused, under its name in the file
    _share_final_norm(sources, config, arch)
    types = {name: source.tensor.type_name for name, source in sources.items() if name not in file.tensors}
    if quantized := {name: kind for name, kind in types.items() if kind not in _PLAIN_TYPES}:
        config["quantization_config"] = {"quant_method": "gguf", "types": quantized}
    return GgufModel(file, config, sources)


def _sources(config: dict[str, Any], arch: Architecture, tensor: GgufTensor, drafts: bool) -> dict[str, Source]:
    """Return the HF tensors in a GGUF tensor; none if the family's WeightMap, or its head's, lacks its name."""
    weight_map, num_layers = FAMILIES[arch.hf_class].weight_map, config.get("num_hidden_layers", 0)
    try:
        if not drafts:
            return _known_sources(config, arch, weight_map, tensor)
        names = head_map(weight_map, num_layers)
        if part := _NEXTN.fullmatch(tensor.name):
            return _nextn_sources(names, copies_of(weight_map, num_layers), GGUF_PARTS[part[1]], tensor)
        return _known_sources(config, arch, names, tensor, num_layers)
    except KeyError:
        return {}


def _nextn_sources(names: WeightMap, copies: dict[str, str], parameter: str, tensor: GgufTensor) -> dict[str, Source]:
    """Return the HF tensor in one of a head that is not its layer's."""
    if parameter in copies:
        return {copies[parameter]: Source(tensor)}
    name = names.names[parameter]
    source = Source(tensor, plus_one=names.adds_one(parameter))
    return {name if name.endswith(".weight") else f"{name}.weight": source}


def _share_final_norm(sources: dict[str, Source], config: dict[str, Any], arch: Architecture) -> None:
    """Give a head the target's final norm if the file has none for it."""
    weight_map = FAMILIES[arch.hf_class].weight_map
    names = head_map(weight_map, config.get("num_hidden_layers", 0)).names
    if f"{names['fc']}.weight" in sources and names["final_norm"] not in sources:
        sources[names["final_norm"]] = sources[weight_map.names["final_norm"]]


def _known_sources(
    config: dict[str, Any], arch: Architecture, weight_map: WeightMap, tensor: GgufTensor, behind: int = 0
) -> dict[str, Source]:
    """Return the HF tensors in a tensor. `behind` is the number of layers before the map's first one."""
    stem, _, kind = tensor.name.rpartition(".")
    if kind not in ("weight", "bias"):
        stem = tensor.name
    block = re.match(r"blk\.(0|[1-9][0-9]{0,3})\.", stem)
    part = stem[block.end() :] if block else stem
    layer = int(block[1]) - behind + weight_map.first_layer if block else 0
    if part in _PAIRS:
        names = [weight_map.names.get(f"routed.{name}") or weight_map.names[name] for name in _PAIRS[part]]
        return _halves(config, tensor, names, layer)
    is_of_experts = part.endswith(_EXPERTS)
    parameter = _PARAMETERS[part.removesuffix(_EXPERTS)]
    if f"gate_{parameter}" in weight_map.names:
        parameter = f"gate_{parameter}"
    if parameter not in weight_map.names:
        parameter = _OTHERWISE[parameter]
    name = weight_map.names[_kind_of(parameter, "routed" if is_of_experts else "dense", weight_map)]
    if parameter in _WHOLE_NAMES:
        pass
    elif not name.endswith(".weight"):
        name += f".{kind}"
    elif kind == "bias":
        name = weight_map.names[f"{parameter}_bias"]
    heads_key = {"q": "num_attention_heads", "k": "num_key_value_heads"}.get(parameter) if arch.interleaved else None
    source = Source(
        tensor,
        interleaved_heads=config[heads_key] if heads_key else 0,
        plus_one=weight_map.adds_one(parameter),
        transposed=weight_map.transposed and block is not None and len(tensor.shape) == 2,
        is_decay=parameter == "decay_log",
        viewed=_viewed(parameter, tensor.shape),
    )
    num_dims = 2 if kind == "bias" else 3  # dimensions of a tensor with all experts
    is_stacked = len(tensor.shape) == num_dims and not source.viewed
    if name.count("{}") != (block is not None) + is_of_experts or is_of_experts != is_stacked:
        raise KeyError(tensor.name)
    if not is_of_experts:
        return {name.format(layer): source}
    return {name.format(layer, i): Source(tensor, expert=i) for i in range(tensor.shape[0])}


def _halves(config: dict[str, Any], tensor: GgufTensor, names: list[str], layer: int) -> dict[str, Source]:
    """Return both HF tensors in a tensor of _PAIRS."""
    sources = dict[str, Source]()
    for which, name in enumerate(names):
        if name.count("{}") == 2:
            for i in range(tensor.shape[0]):
                sources[f"{name.format(layer, i)}.weight"] = Source(tensor, expert=i, half=(1, which))
        else:
            sources[f"{name.format(layer)}.weight"] = Source(tensor, half=(config["linear_num_key_heads"], which))
    return sources


def _kind_of(parameter: str, kind: str, weight_map: WeightMap) -> str:
    """Return the key of a map within a mixture or outside, in `WeightMap.names`."""
    key = f"{kind}.{parameter}"
    return key if key in weight_map.names else parameter


def _viewed(parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return HF's shape for a tensor that gains or loses dimensions in the converter; () for others."""
    if parameter in ("k_b", "v_b") and len(shape) == 3:
        return shape[0] * shape[1], shape[2]
    if parameter == "conv" and len(shape) == 2:
        return shape[0], 1, shape[1]
    return (1, *shape) if parameter == "shared_gate" and len(shape) == 1 else ()


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", configs.llama_config, interleaved=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", configs.decoder_config),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", configs.decoder_config),
    "qwen3vl": Architecture("Qwen3VLForConditionalGeneration", "qwen3_vl_text", configs.decoder_config),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", configs.qwen3moe_config),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", configs.qwen2moe_config),
    "qwen35": Architecture("Qwen3_5ForCausalLM", "qwen3_5_text", configs.qwen35_config),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", configs.qwen35moe_config),
    "qwen3next": Architecture("Qwen3NextForCausalLM", "qwen3_next", configs.qwen3next_config),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", gguf_gemma.gemma2_config),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", gguf_gemma.gemma3_config),
    "gemma4": Architecture("Gemma4ForCausalLM", "gemma4_text", gguf_gemma.gemma4_config),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", configs.phi3_config),
    "gpt2": Architecture("GPT2LMHeadModel", "gpt2", configs.gpt2_config),
    "gpt-oss": Architecture("GptOssForCausalLM", "gpt_oss", configs.gpt_oss_config),
    "glm4": Architecture("Glm4ForCausalLM", "glm4", configs.llama_config),
    "glm4moe": Architecture("Glm4MoeForCausalLM", "glm4_moe", configs.glm4moe_config),
    "granite": Architecture("GraniteForCausalLM", "granite", configs.granite_config, interleaved=True),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", "deepseek_v2", configs.deepseek2_config),
    "granitemoe": Architecture("GraniteMoeForCausalLM", "granitemoe", configs.granitemoe_config, interleaved=True),
    "lfm2": Architecture("Lfm2ForCausalLM", "lfm2", configs.lfm2_config),
    "lfm2moe": Architecture("Lfm2MoeForCausalLM", "lfm2_moe", configs.lfm2moe_config),
    "mistral3": Architecture("Ministral3ForCausalLM", "ministral3", configs.mistral3_config, interleaved=True),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", configs.olmo2_config),
    "olmoe": Architecture("OlmoeForCausalLM", "olmoe", configs.olmoe_config),
    "seed_oss": Architecture("SeedOssForCausalLM", "seed_oss", configs.seed_oss_config),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", configs.llama_config, interleaved=True),
}
_OLMO_3 = Architecture("Olmo3ForCausalLM", "olmo3", configs.olmo3_config)  # an olmo2 file with windows
# A deepseek2 file with DeepSeek-V3's router, such as GLM-4.7-Flash's
_DEEPSEEK_3 = Architecture("DeepseekV3ForCausalLM", "deepseek_v3", configs.deepseek2_config)
# A llama file with experts
_MIXTRAL = Architecture("MixtralForCausalLM", "mixtral", configs.mixtral_config, interleaved=True)
