"""The weights of a model on a device, in sentences for `callboard inspect` and the log."""

from __future__ import annotations

from collections import defaultdict

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.kernels.numerics import Numerics
from runtime.quant.at_load import PLAIN
from runtime.quant.model_formats import weight_formats
from runtime.quant.quantized_formats import DequantizedFormat, QuantizedFormat

_GIB = 1 << 30


def weight_report(spec: DecoderSpec, numerics: Numerics) -> list[str]:
    """One line for each encoding with its bytes on the device, then the dense weights with the reason.

    Empty for a model without quantized weights."""
    schemes, dtype = spec.quantization or {}, numerics.dtype_name
    if not schemes:
        return []
    format_of = weight_formats(spec, numerics)
    shapes = spec.shapes() | {"head": (spec.vocab_size, spec.hidden_size)}
    if spec.tied_head and "head" not in schemes:
        del shapes["head"]
    sizes: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    not_taken, plain = dict[str, None](), dict[str, None]()
    for name, shape in shapes.items():
        weight_format, scheme = format_of(name), schemes.get(name)
        size = weight_format.device_bytes(shape, numerics)
        if scheme and isinstance(weight_format, QuantizedFormat):
            how = ", quantized as they are read" if scheme.layout == PLAIN else ""
            sizes[weight_format.name, how].append((size, size))
        elif scheme and isinstance(weight_format, DequantizedFormat):
            why = "quantization is none" if scheme.dequantized else "this device has no products for it"
            sizes[weight_format.name, why].append((weight_format.encoding.device_bytes(shape), size))
        elif not name.endswith(("norm", "bias")):
            part = name.removesuffix(".weight").rpartition(".")[2]
            reasons = not_taken if scheme and name != "embed" else plain
            reasons[f"experts' {part}" if ".experts." in name else part] = None
    lines = []
    for (encoding, text), map_bytes in sizes.items():
        quantized, held = (sum(part) / _GIB for part in zip(*map_bytes, strict=True))
        how = text if held == quantized else f", dequantized to {held:.2f} GiB of {dtype} as {text}"
        lines.append(f"{len(map_bytes)} maps in {encoding}: {quantized:.2f} GiB{how}")
    if not_taken:
        lines.append(f"{', '.join(not_taken)} stay {dtype}, as this device has no products for their encoding")
    layouts = {scheme.layout for scheme in schemes.values()}
    if layouts == {PLAIN}:
        why = f"stay {dtype}{'; head_quantization is for the head' if 'head' not in schemes else ''}"
    elif any(layout.startswith("gguf") for layout in layouts):
        why = "are dequantized as they are read"
    else:
        why = "are plain numbers in the checkpoint"
    return [*lines, f"{', '.join([*plain, 'norms and biases'])} {why}"]
