"""NVIDIA ModelOpt: fp8 with a scale a tensor or a row, and nvfp4.

https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/export (hf_quant_config.json)"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from runtime.quant.scheme import Rule, Scheme, group_size, refusal, strings


def parse(config: Mapping[str, Any]) -> Rule:
    config = config.get("quantization") or config  # hf_quant_config.json has it within
    plain = strings(config, "exclude_modules") + strings(config, "ignore")
    algorithm = config.get("quant_algo")
    layers = config.get("quantized_layers") or {} if algorithm == "MIXED_PRECISION" else None
    of_layer = {name: _scheme(described) for name, described in (layers or {}).items()}
    scheme = _scheme(config) if layers is None else None

    def rule(parameter: str, module: str) -> Scheme | None:
        if any(fnmatchcase(module, name) or module.startswith(f"{name}.") for name in plain):
            return None
        return scheme if layers is None else of_layer.get(module)

    return rule


def _scheme(config: Mapping[str, Any]) -> Scheme:
    match config.get("quant_algo"):
        case "FP8":
            return Scheme("modelopt fp8", "fp8", rows=0)
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return Scheme("modelopt fp8", "fp8")
        case "NVFP4":
            return Scheme("modelopt nvfp4", "fp4", columns=group_size(config, "group_size") or 16)
        case other:
            raise refusal(
                "quant_algo", other, "FP8, FP8_PER_CHANNEL_PER_TOKEN, NVFP4 and MIXED_PRECISION are supported"
            )
