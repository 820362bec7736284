"""Quantization: how a checkpoint describes its quantized weights, and how a device holds and multiplies them.

1. A parser (`parsers.py`, `compressed_tensors.py`) reads a `quantization_config`: each parameter gets a
   `QuantizationScheme` (`scheme.py`).
2. The scheme's layout (`checkpoint_layouts.py`) reads the tensors of any method into one of a few encodings
   (`encodings.py`): quantized values, scales and perhaps zero points.
3. The weight stays quantized if the backend has products for its encoding (`triton_format.py`, `llvm_format.py`), or
   becomes dense (`quantized_formats.py`). `model_formats.py` decides for each parameter of a model.
4. The weight is a `HeldWeight` (`held_weight.py`) from there to the kernels.

The parsers do not import torch, so that a config.json can be checked without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runtime.base.model.decoder_spec import chooses_experts
from runtime.base.types import CallboardError
from runtime.quant import compressed_tensors, parsers
from runtime.quant.scheme import Parser, QuantizationScheme

METHODS: dict[str, Parser] = {  # by the quant_method of a config.json's quantization_config
    "compressed-tensors": compressed_tensors.parse,
    "fp8": parsers.parse_fp8,
    "awq": parsers.parse_awq,
    "gptq": parsers.parse_gptq,
    "bitsandbytes": parsers.parse_bitsandbytes,
    "modelopt": parsers.parse_modelopt,
    "modelopt_fp4": parsers.parse_modelopt,
    "mxfp4": parsers.parse_mxfp4,
    "gguf": parsers.parse_gguf,
}


def parse_schemes(
    config: Mapping[str, Any], names: Callable[[], Mapping[str, str]], base: str
) -> dict[str, QuantizationScheme]:
    """The scheme of each quantized linear weight of a config.json; parameters without an entry are not quantized.

    `names` returns the checkpoint's names of our parameters, which may start with `base`.
    Raises CallboardError, in one sentence with the key, if the config has a feature that cannot be read."""
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
        if parameter == "head"
        or (parameter in ("embed", "layer_embed") and method == "gguf")
        or (parameter.endswith(".weight") and not chooses_experts(parameter))
    }
    readings = [
        {parameter: scheme for parameter, name in linears.items() if (scheme := rule(parameter, prefix + name))}
        for prefix in sorted({"", base})
    ]
    # Configs name modules with or without the base, in their lists of quantized and of unquantized modules.
    first, *others = [reading for reading in readings if reading] or [{}]
    return {parameter: scheme for parameter, scheme in first.items() if all(parameter in other for other in others)}


def has_fp8_kv_cache(config: Mapping[str, Any]) -> bool:
    """True if a config.json has a kv_cache_scheme, as compressed-tensors writes it, of fp8."""
    found = _quantization_config(config)
    scheme = found.get("kv_cache_scheme") if isinstance(found, Mapping) else None
    return isinstance(scheme, Mapping) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)


def _quantization_config(config: Mapping[str, Any]) -> Any:
    """The quantization_config of a config.json; exporters put it into one of several places."""
    places = (config, config.get("text_config") or {})
    keys = ("quantization_config", "compression_config")
    return next((place[key] for place in places for key in keys if place.get(key)), None)
