"""AWQ in its `gemm` version: 4 bits with zero points, output columns interleaved in words.

https://github.com/casper-hansen/AutoAWQ, awq/utils/packing_utils.py"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.quant.scheme import Rule, Scheme, group_size, refusal, strings


def parse(config: Mapping[str, Any]) -> Rule:
    if (bits := config.get("bits", config.get("w_bit", 4))) != 4:
        raise refusal("bits", bits, "AWQ weights of 4 bits are supported")
    version = config.get("version") or config.get("format") or "gemm"
    if str(version).lower() != "gemm":
        raise refusal("version", version, "AWQ weights of version gemm are supported")
    columns = group_size(config, "group_size" if "group_size" in config else "q_group_size")
    scheme = Scheme("awq", "int4", columns=columns, symmetric=False)
    plain = strings(config, "modules_to_not_convert")

    def rule(parameter: str, module: str) -> Scheme | None:
        is_plain = (parameter == "head" and not config.get("lm_head")) or any(part in module for part in plain)
        return None if is_plain else scheme

    return rule
