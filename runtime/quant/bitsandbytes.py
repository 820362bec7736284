"""bitsandbytes: tables of 16 numbers (nf4, fp4) over the flattened weight, or int8 with a scale a row.

https://github.com/bitsandbytes-foundation/bitsandbytes, bitsandbytes/functional.py (QuantState)"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.quant.scheme import Rule, Scheme, named_by, refusal, strings

_TABLES = {"nf4": "nf4", "fp4": "bitsandbytes fp4"}  # by the config's bnb_4bit_quant_type
_COLUMNS = 64  # consecutive weights that share a scale


def parse(config: Mapping[str, Any]) -> Rule:
    if config.get("load_in_4bit"):
        kind = config.get("bnb_4bit_quant_type", "fp4")
        if kind not in _TABLES:
            raise refusal("bnb_4bit_quant_type", kind, f"{' and '.join(_TABLES)} are supported")
        if (storage := config.get("bnb_4bit_quant_storage") or "uint8") != "uint8":
            raise refusal("bnb_4bit_quant_storage", storage, "uint8 is supported")
        nested = " nested" if config.get("bnb_4bit_use_double_quant") else ""
        scheme = Scheme(f"bitsandbytes{nested}", _TABLES[kind], columns=_COLUMNS)
    elif config.get("load_in_8bit"):
        scheme = Scheme("bitsandbytes int8", "int8")
    else:
        raise refusal("load_in_4bit", config.get("load_in_4bit"), "it or load_in_8bit must be true")
    is_plain = named_by(strings(config, "llm_int8_skip_modules"))

    def rule(parameter: str, module: str) -> Scheme | None:
        return None if parameter == "head" or is_plain(module) else scheme

    return rule
