"""Quantization: what a checkpoint says about its weights -> how they are read, held and multiplied with.

A method's parser (`compressed_tensors.py`, `gptq.py`, ...) gives each parameter a `Scheme`; its layout (`layouts.py`)
reads the tensors of all methods into one of a few forms (`forms.py`), which are widened or stay codes (`quantized.py`).
Torch is not imported by the parsers: the checks of a config.json need no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runtime.quant import awq, bitsandbytes, compressed_tensors, fp8_block, gguf, gptq, modelopt, mxfp4
from runtime.quant.scheme import Parser, Scheme
from runtime.spec.types import CallboardError

METHODS: dict[str, Parser] = {  # by the quant_method of a config.json's quantization_config
    "compressed-tensors": compressed_tensors.parse,
    "fp8": fp8_block.parse,
    "awq": awq.parse,
    "gptq": gptq.parse,
    "bitsandbytes": bitsandbytes.parse,
    "modelopt": modelopt.parse,
    "modelopt_fp4": modelopt.parse,
    "mxfp4": mxfp4.parse,
    "gguf": gguf.parse,
}


def parse_schemes(config: Mapping[str, Any], names: Callable[[], Mapping[str, str]], base: str) -> dict[str, Scheme]:
    """The scheme of each weight of a linear map that a config.json calls quantized; the others are plain numbers.

    `names` returns the checkpoint's names of our parameters, which may have `base` before them.
    Raises CallboardError, in one sentence with the key, if the config asks for what cannot be read."""
    if (found := _quantization_config(config)) is None:
        return {}
    method = found.get("quant_method") if isinstance(found, Mapping) else found
    if isinstance(found, Mapping) and method is None and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        method = "bitsandbytes"
    if not (isinstance(method, str) and method in METHODS):
        raise CallboardError(
            f"The model's weights are quantized by {str(method)[:40]} (quant_method); supported are "
            f"{', '.join(METHODS)}."
        )
    try:
        rule = METHODS[method](found)
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise CallboardError(f"The model's quantization_config is not one of {method} ({e!r}).") from e
    linears = {
        parameter: name.removesuffix(".weight")
        for parameter, name in names().items()
        if parameter == "head" or (parameter.endswith(".weight") and ".router." not in parameter)
    }
    readings = [
        {parameter: scheme for parameter, name in linears.items() if (scheme := rule(parameter, prefix + name))}
        for prefix in sorted({"", base})
    ]
    # A config says names with or without the base: those that it lists as quantized, or as not quantized.
    first, *others = [reading for reading in readings if reading] or [{}]
    return {parameter: scheme for parameter, scheme in first.items() if all(parameter in other for other in others)}


def asks_for_fp8_kv_cache(config: Mapping[str, Any]) -> bool:
    """True if a config.json has a kv_cache_scheme, as compressed-tensors writes it, of fp8."""
    found = _quantization_config(config)
    scheme = found.get("kv_cache_scheme") if isinstance(found, Mapping) else None
    return isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)


def _quantization_config(config: Mapping[str, Any]) -> Any:
    """That of a config.json, wherever its exporter put it."""
    places = (config, config.get("text_config") or {})
    keys = ("quantization_config", "compression_config")
    return next((place[key] for place in places for key in keys if place.get(key)), None)
