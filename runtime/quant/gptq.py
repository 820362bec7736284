"""GPTQ: 4 or 8 bits packed down the input columns, whose groups may be in the order of their importance (desc_act).

https://github.com/ModelCloud/GPTQModel, gptqmodel/quantization/config.py and gptqmodel/utils/model.py"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.quant.scheme import Rule, Scheme, compiled, group_size, refusal

_LAYOUTS = ("gptq", "gptq_v2")  # of the config's checkpoint_format; the first has zero points less one


def parse(config: Mapping[str, Any]) -> Rule:
    scheme = _scheme(config)
    overrides = config.get("dynamic") or {}
    of_pattern = [
        (
            compiled(pattern.removeprefix("+:").removeprefix("-:")),
            None if pattern.startswith("-:") else _scheme({**config, **changes}),
        )
        for pattern, changes in overrides.items()
    ]

    def rule(parameter: str, module: str) -> Scheme | None:
        for pattern, other in of_pattern:
            if pattern.match(module):
                return other
        return None if parameter == "head" and not config.get("lm_head") else scheme

    return rule


def _scheme(config: Mapping[str, Any]) -> Scheme:
    if (bits := config.get("bits", 4)) not in (4, 8):
        raise refusal("bits", bits, "GPTQ weights of 4 or 8 bits are supported")
    version = config.get("checkpoint_format") or config.get("format") or "gptq"
    if version not in _LAYOUTS:
        raise refusal("checkpoint_format", version, f"{' and '.join(_LAYOUTS)} are supported")
    columns, symmetric = group_size(config, "group_size"), bool(config.get("sym", True))
    return Scheme(version, f"int{bits}", 1, columns, symmetric, bool(config.get("desc_act")))
