"""fp8 as DeepSeek and Qwen publish it: a scale for each block of 128 x 128 weights, or one for a whole tensor.

https://github.com/huggingface/transformers, src/transformers/integrations/finegrained_fp8.py"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.quant.compressed_tensors import block_size
from runtime.quant.scheme import Rule, Scheme, named_by, refusal, strings


def parse(config: Mapping[str, Any]) -> Rule:
    if (kind := config.get("fmt") or "e4m3") != "e4m3":
        raise refusal("fmt", kind, "e4m3 is supported")
    rows, columns = block_size(config, "weight_block_size") if config.get("weight_block_size") else (0, 0)
    scheme = Scheme("fp8", "fp8", rows, columns)
    is_plain = named_by(strings(config, "modules_to_not_convert") + strings(config, "ignored_layers"))

    def rule(parameter: str, module: str) -> Scheme | None:
        return None if parameter == "head" or is_plain(module) else scheme

    return rule
