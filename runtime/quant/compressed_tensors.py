"""The parser for compressed-tensors (llm-compressor): module groups, each with its own format.

https://github.com/vllm-project/compressed-tensors, src/compressed_tensors/quantization/quant_config.py"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from runtime.quant.scheme import QuantizationScheme, Rule, block_size, compiled, group_size_of, refusal, strings

_ONE_BY_ONE = {"int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized"}  # one value an element
_LINEAR = "Linear"  # class of all modules with a rule here


def parse(config: Mapping[str, Any]) -> Rule:
    sparsity, transform = config.get("sparsity_config") or {}, config.get("transform_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise refusal("sparsity_config.format", sparsity["format"], "sparse weights are not supported")
    if transform.get("config_groups"):
        raise refusal("transform_config", transform, "weights that need a transform are not supported")
    by_name: dict[
        str, QuantizationScheme | None
    ] = {}  # a module's name precedes a pattern, and a pattern precedes the class
    by_pattern: list[tuple[re.Pattern[str], QuantizationScheme | None]] = []
    for name, group in (config.get("config_groups") or {}).items():
        if not isinstance(group, Mapping):
            raise refusal(f"config_groups.{name}", group, "its weights must be described")
        scheme = _scheme(group, group.get("format") or config.get("format"))
        for target in strings(group, "targets"):
            if target.startswith("re:"):
                by_pattern.append((compiled(target.removeprefix("re:")), scheme))
            else:
                by_name.setdefault(target, scheme)
    ignored = strings(config, "ignore")
    ignored_names = {entry for entry in ignored if not entry.startswith("re:")}
    ignored_patterns = [compiled(entry.removeprefix("re:")) for entry in ignored if entry.startswith("re:")]

    def rule(parameter: str, module: str) -> QuantizationScheme | None:
        if not ignored_names.isdisjoint((module, _LINEAR)) or any(entry.match(module) for entry in ignored_patterns):
            return None
        if module in by_name:
            return by_name[module]
        return next((scheme for pattern, scheme in by_pattern if pattern.match(module)), by_name.get(_LINEAR))

    return rule


def _scheme(group: Mapping[str, Any], stored_as: str | None) -> QuantizationScheme | None:
    weights = group.get("weights")
    if not weights or stored_as == "dense":
        return None
    kind = weights.get("type", "int"), weights.get("num_bits", 8)
    if stored_as in (None, "mixed-precision"):
        stored_as = "pack-quantized" if kind[0] == "int" and not group.get("input_activations") else "naive-quantized"
    group_size = group_size_of(weights, "group_size")
    strategy = weights.get("strategy") or (
        "group" if group_size else "channel" if "group_size" in weights else "tensor"
    )
    match strategy:
        case "tensor":
            shared = 0, 0
        case "channel":
            shared = 1, 0
        case "group" | "tensor_group":
            shared = 1, group_size
        case "block":
            shared = block_size(weights, "block_structure")
        case _:
            raise refusal("strategy", strategy, "tensor, channel, group, tensor_group and block are known")
    symmetric = weights.get("symmetric", True)
    reordered = weights.get("actorder") in (True, "group", "dynamic")
    match stored_as, kind:
        case "pack-quantized", ("int", 4 | 8 as bits):
            return QuantizationScheme("compressed-tensors packed", f"int{bits}", *shared, symmetric, reordered)
        case "nvfp4-pack-quantized", ("float", 4):
            return QuantizationScheme("compressed-tensors nvfp4", "fp4", *shared)
        case "mxfp4-pack-quantized", ("float", 4):
            return QuantizationScheme("compressed-tensors mxfp4", "fp4", *shared, scale_dtype="float8_e8m0fnu")
        case _, ("int", 8) if stored_as in _ONE_BY_ONE:
            return QuantizationScheme("compressed-tensors", "int8", *shared, symmetric, reordered)
        case _, ("float", 8) if stored_as in _ONE_BY_ONE:
            return QuantizationScheme("compressed-tensors", "fp8", *shared)
    described = f"{stored_as} of {kind[0]} with num_bits {kind[1]}"
    raise refusal("format", described, "integers of 4 or 8 bits, fp8, nvfp4 and mxfp4 are supported")
