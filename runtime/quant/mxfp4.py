"""mxfp4 as gpt-oss has it: blocks of 32 numbers of 4 bits, and the exponent of each block.

https://github.com/openai/gpt-oss, gpt_oss/torch/weights.py"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.quant.scheme import Rule, Scheme, named_by, strings


def parse(config: Mapping[str, Any]) -> Rule:
    scheme = Scheme("mxfp4", "fp4", columns=32)
    is_plain = named_by(strings(config, "modules_to_not_convert"))

    def rule(parameter: str, module: str) -> Scheme | None:
        return None if parameter == "head" or is_plain(module) else scheme

    return rule
