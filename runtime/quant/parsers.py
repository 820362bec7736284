"""Parsers for `quantization_config`, one function for each quant_method but compressed-tensors.

A parser returns a `Rule`: a function that returns a parameter's scheme, or None for an unquantized one."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from runtime.quant.scheme import (
    QuantizationScheme,
    Rule,
    block_size,
    compiled,
    group_size_of,
    named_by,
    refusal,
    strings,
)

_BITSANDBYTES_TABLES = {"nf4": "nf4", "fp4": "bitsandbytes fp4"}  # bnb_4bit_quant_type -> encoding
_BITSANDBYTES_GROUP = 64  # consecutive weights that share a scale
_GPTQ_LAYOUTS = ("gptq", "gptq_v2")  # values of checkpoint_format; "gptq" stores each zero point less one
_FACTORS: dict[str, Any] = {"group_size": 32, "symmetric": False, "super_size": 256}  # types Q4_K and Q5_K
_HALF: dict[str, Any] = {"group_size": 32, "scale_dtype": "float16"}  # fields for types with blocks of 32 columns
_POWERS: dict[str, Any] = {"group_size": 32, "scale_dtype": "float8_e8m0fnu"}  # fields for mxfp4
_GGUF_TYPES = {
    "Q8_0": QuantizationScheme("gguf Q8_0", "int8", **_HALF),
    "Q4_0": QuantizationScheme("gguf Q4_0", "int4", **_HALF),
    "Q4_1": QuantizationScheme("gguf Q4_1", "int4", symmetric=False, **_HALF),
    "Q5_0": QuantizationScheme("gguf Q5_0", "int8", value_bits=5, **_HALF),
    "Q5_1": QuantizationScheme("gguf Q5_1", "int8", symmetric=False, value_bits=5, **_HALF),
    "Q4_K": QuantizationScheme("gguf Q4_K", "int4", **_FACTORS),
    "Q5_K": QuantizationScheme("gguf Q5_K", "int8", value_bits=5, **_FACTORS),
    "Q6_K": QuantizationScheme("gguf Q6_K", "int8", group_size=16, value_bits=6, super_size=256),
    "MXFP4": QuantizationScheme("gguf MXFP4", "fp4", **_POWERS),
}


def parse_awq(config: Mapping[str, Any]) -> Rule:
    """AWQ in its `gemm` version: 4 bits with zero points, output columns interleaved in words.

    https://github.com/casper-hansen/AutoAWQ, awq/utils/packing_utils.py"""
    if (bits := config.get("bits", config.get("w_bit", 4))) != 4:
        raise refusal("bits", bits, "AWQ weights of 4 bits are supported")
    version = config.get("version") or config.get("format") or "gemm"
    if str(version).lower() != "gemm":
        raise refusal("version", version, "AWQ weights of version gemm are supported")
    group_size = group_size_of(config, "group_size" if "group_size" in config else "q_group_size")
    scheme = QuantizationScheme("awq", "int4", group_size=group_size, symmetric=False)
    unquantized = strings(config, "modules_to_not_convert")

    def rule(parameter: str, module: str) -> QuantizationScheme | None:
        is_head = parameter == "head" and not config.get("lm_head")
        return None if is_head or any(part in module for part in unquantized) else scheme

    return rule


def parse_bitsandbytes(config: Mapping[str, Any]) -> Rule:
    """bitsandbytes: tables of 16 numbers (nf4, fp4) over the flattened weight, or int8 with a scale a row.

    https://github.com/bitsandbytes-foundation/bitsandbytes, bitsandbytes/functional.py (QuantState)"""
    if config.get("load_in_4bit"):
        kind = config.get("bnb_4bit_quant_type", "fp4")
        if kind not in _BITSANDBYTES_TABLES:
            raise refusal("bnb_4bit_quant_type", kind, f"{' and '.join(_BITSANDBYTES_TABLES)} are supported")
        if (storage := config.get("bnb_4bit_quant_storage") or "uint8") != "uint8":
            raise refusal("bnb_4bit_quant_storage", storage, "uint8 is supported")
        nested = " nested" if config.get("bnb_4bit_use_double_quant") else ""
        scheme = QuantizationScheme(f"bitsandbytes{nested}", _BITSANDBYTES_TABLES[kind], group_size=_BITSANDBYTES_GROUP)
    elif config.get("load_in_8bit"):
        scheme = QuantizationScheme("bitsandbytes int8", "int8")
    else:
        raise refusal("load_in_4bit", config.get("load_in_4bit"), "it or load_in_8bit must be true")
    return _unless(scheme, strings(config, "llm_int8_skip_modules"))


def parse_fp8(config: Mapping[str, Any]) -> Rule:
    """fp8 as DeepSeek and Qwen publish it: a scale for each block of 128 x 128 weights, or one for a whole tensor.

    https://github.com/huggingface/transformers, src/transformers/integrations/finegrained_fp8.py"""
    if (kind := config.get("fmt") or "e4m3") != "e4m3":
        raise refusal("fmt", kind, "e4m3 is supported")
    rows, columns = block_size(config, "weight_block_size") if config.get("weight_block_size") else (0, 0)
    unquantized = strings(config, "modules_to_not_convert") + strings(config, "ignored_layers")
    return _unless(QuantizationScheme("fp8", "fp8", rows, columns), unquantized)


def parse_gguf(config: Mapping[str, Any]) -> Rule:
    """GGUF: each tensor's type, which the file's reader puts into a quantization_config.

    The `gguf` package dequantizes tensors with types that `_GGUF_TYPES` does not list."""
    types: Mapping[str, str] = config["types"]  # key: the tensor's name
    return lambda parameter, module: _GGUF_TYPES.get(types.get(f"{module}.weight", ""))


def parse_gptq(config: Mapping[str, Any]) -> Rule:
    """GPTQ: 4 or 8 bits packed down the input columns; with desc_act, groups follow the importance of columns.

    https://github.com/ModelCloud/GPTQModel, gptqmodel/quantization/config.py and gptqmodel/utils/model.py"""
    scheme = _gptq_scheme(config)
    overrides = config.get("dynamic") or {}
    by_pattern = [
        (
            compiled(pattern.removeprefix("+:").removeprefix("-:")),
            None if pattern.startswith("-:") else _gptq_scheme({**config, **changes}),
        )
        for pattern, changes in overrides.items()
    ]

    def rule(parameter: str, module: str) -> QuantizationScheme | None:
        for pattern, other in by_pattern:
            if pattern.match(module):
                return other
        return None if parameter == "head" and not config.get("lm_head") else scheme

    return rule


def _gptq_scheme(config: Mapping[str, Any]) -> QuantizationScheme:
    if (bits := config.get("bits", 4)) not in (4, 8):
        raise refusal("bits", bits, "GPTQ weights of 4 or 8 bits are supported")
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in _GPTQ_LAYOUTS:
        raise refusal("checkpoint_format", version, f"{' and '.join(_GPTQ_LAYOUTS)} are supported")
    group_size, symmetric = group_size_of(config, "group_size"), bool(config.get("sym", True))
    return QuantizationScheme(version, f"int{bits}", 1, group_size, symmetric, bool(config.get("desc_act")))


def parse_modelopt(config: Mapping[str, Any]) -> Rule:
    """NVIDIA ModelOpt: fp8 with a scale a tensor or a row, and nvfp4.

    https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/export (hf_quant_config.json)"""
    config = config.get("quantization") or config  # hf_quant_config.json nests it
    unquantized = strings(config, "exclude_modules") + strings(config, "ignore")
    algorithm = config.get("quant_algo")
    layers = config.get("quantized_layers") or {} if algorithm == "MIXED_PRECISION" else None
    by_layer = {name: _modelopt_scheme(described) for name, described in (layers or {}).items()}
    scheme = _modelopt_scheme(config) if layers is None else None

    def rule(parameter: str, module: str) -> QuantizationScheme | None:
        if any(fnmatchcase(module, name) or module.startswith(f"{name}.") for name in unquantized):
            return None
        return scheme if layers is None else by_layer.get(module)

    return rule


def _modelopt_scheme(config: Mapping[str, Any]) -> QuantizationScheme:
    match config.get("quant_algo"):
        case "FP8":
            return QuantizationScheme("modelopt fp8", "fp8", scale_rows=0)
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return QuantizationScheme("modelopt fp8", "fp8")
        case "NVFP4":
            return QuantizationScheme("modelopt nvfp4", "fp4", group_size=group_size_of(config, "group_size") or 16)
        case other:
            raise refusal(
                "quant_algo", other, "FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4 and MIXED_PRECISION are supported"
            )


def parse_mxfp4(config: Mapping[str, Any]) -> Rule:
    """mxfp4 as gpt-oss stores it: blocks with 32 elements of 4 bits, and one exponent for each block.

    https://github.com/openai/gpt-oss, gpt_oss/torch/weights.py"""
    scheme = QuantizationScheme("mxfp4", "fp4", **_POWERS)
    return _unless(scheme, strings(config, "modules_to_not_convert"))


def _unless(scheme: QuantizationScheme, unquantized: list[str]) -> Rule:
    """The rule of configs with one scheme: None for the head and for modules that the patterns name."""
    is_unquantized = named_by(unquantized)
    return lambda parameter, module: None if parameter == "head" or is_unquantized(module) else scheme
