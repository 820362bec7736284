"""The formats of a draft head's weights: its layers, and the output head for its logits.

Draft logits may be inexact. So their output head has 8-bit rows, with half the bytes: a copy of the target's, or the
head's own."""

from __future__ import annotations

from dataclasses import replace

from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.head_spec import HeadSpec
from runtime.kernels.numerics import Numerics
from runtime.quant.at_load import schemes_at_load
from runtime.quant.model_formats import check_products, encodings_at_load, encodings_on_device, weight_formats
from runtime.quant.quantized_formats import QuantizedFormat
from runtime.quant.weight_format import DenseFormat, WeightFormat

OUTPUTS = "head", "draft_head"  # the target's output head, and a head's own
_AUTO = "int8"  # no slower than fp8 for 1 to 16 rows on a GPU, with a quarter of its divergence
_OF_LAYERS = ("int4", "nf4")  # too coarse for an output head, which then is int8


def quantized_head(head: HeadSpec, target: DecoderSpec, config: EngineConfig, numerics: Numerics) -> HeadSpec:
    """The head with the schemes that `config` sets. `head` and `target` are whole; the target has its own schemes.

    Layers follow `quantization`, or draft_quantization if that is set. What the file has in another encoding stays.
    Raises CallboardError if this device lacks products for them."""
    spec, encoding, own = head.decoder, config.quantization, config.draft_quantization
    schemes = dict(spec.quantization or {})
    if own != "auto":
        encoding = own
    if encoding == "none":
        schemes = {name: replace(scheme, dequantized=True) for name, scheme in schemes.items()}
    elif encoding != "auto":
        schemes = schemes_at_load(spec, config, encoding, numerics.device.type) | schemes
    # An assistant's output head is its embedding, or a table from which it gathers rows.
    output = "" if head.kind == "assistant" else _output_encoding(own, numerics)
    name = "draft_head" if head.own_head else "head"
    if output and name not in schemes and (head.own_head or _is_copied(target, numerics)):
        schemes |= schemes_at_load(spec, config, output, numerics.device.type, [name])
    quantized = replace(head, decoder=replace(spec, quantization=schemes or None))
    settings = replace(config, quantization=encoding, head_quantization="auto")
    check_products(quantized.decoder.of_rank(target.shard), numerics, settings, is_draft=own != "auto")
    return quantized


def _output_encoding(own: str, numerics: Numerics) -> str:
    """The encoding of the output head by draft_quantization; empty for none."""
    if own == "none" or numerics.rank_invariant:  # leaves keep no rows of the whole
        return ""
    if own == "auto":
        return _AUTO if _AUTO in encodings_at_load(numerics) else ""
    return _AUTO if own in _OF_LAYERS else own


def _is_copied(target: DecoderSpec, numerics: Numerics) -> bool:
    """True if the device has the target's output head as dense rows.

    A CPU packs an untied head, and keeps the embedding."""
    is_dense = isinstance(weight_formats(target, numerics)("head"), DenseFormat)
    return is_dense and (target.tied_head or numerics.backend == "triton")


def copy_format(spec: DecoderSpec, numerics: Numerics) -> WeightFormat | None:
    """The format for a copy of the target's output head; None without one. `spec` is a rank's."""
    if "head" not in spec.lent:
        return None
    found = weight_formats(spec, numerics)("head")
    return found if isinstance(found, QuantizedFormat) else None


def copy_bytes(spec: DecoderSpec, numerics: Numerics) -> int:
    """The bytes of that copy."""
    found = copy_format(spec, numerics)
    return 0 if found is None else found.device_bytes((spec.vocab_size, spec.hidden_size), numerics)


def layer_encodings(spec: DecoderSpec, numerics: Numerics) -> dict[str, str]:
    """The encodings of a head's parameters that decide on its keys and values."""
    return {name: form for name, form in encodings_on_device(spec, numerics).items() if name not in OUTPUTS}
