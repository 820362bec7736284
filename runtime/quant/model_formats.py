"""The weight formats of a whole model, with the names, bytes and checks that derive from them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial

import torch

from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.sharding import leaves_of, stored_shape, ungrouped
from runtime.base.shard import Shard
from runtime.base.types import CallboardError
from runtime.kernels.numerics import Numerics
from runtime.kernels.triton_language import INTERPRETED
from runtime.quant.at_load import GROUPS, PLAIN, requested_encodings
from runtime.quant.checkpoint_layouts import (
    Awq,
    BitsAndBytes4,
    CheckpointLayout,
    Gptq,
    Nibbles,
    OneByOne,
    PackedWords,
    Plain,
)
from runtime.quant.encodings import Encoding, encoding_of
from runtime.quant.gguf_blocks import TYPES, GgufBlocks
from runtime.quant.quantized_formats import DequantizedFormat, QuantizedFormat
from runtime.quant.scheme import QuantizationScheme
from runtime.quant.weight_format import DENSE, DenseFormat, Shape, WeightFormat

LAYOUTS: dict[str, Callable[[QuantizationScheme], CheckpointLayout]] = {  # key: `QuantizationScheme.layout`
    "compressed-tensors": OneByOne,
    "compressed-tensors packed": PackedWords,
    "compressed-tensors nvfp4": partial(
        Nibbles, quantized="weight_packed", scale="weight_scale", of_tensor="weight_global_scale", divides=True
    ),
    "compressed-tensors mxfp4": partial(Nibbles, quantized="weight_packed", scale="weight_scale"),
    "fp8": partial(OneByOne, scales=("weight_scale_inv", "weight_scale")),
    "awq": Awq,
    "gptq": partial(Gptq, less=1),
    "gptq_v2": partial(Gptq, less=0),
    # The library's own decimal value for 1 / 127.
    "bitsandbytes int8": partial(OneByOne, scales=("SCB",), factor=7.874015718698502e-3),
    "bitsandbytes": partial(BitsAndBytes4, nested=False),
    "bitsandbytes nested": partial(BitsAndBytes4, nested=True),
    "modelopt fp8": OneByOne,
    "modelopt nvfp4": partial(Nibbles, quantized="weight", scale="weight_scale", of_tensor="weight_scale_2"),
    PLAIN: Plain,
    **dict.fromkeys((f"gguf {name}" for name in TYPES), GgufBlocks),
    "mxfp4": partial(Nibbles, quantized="weight_blocks", scale="weight_scales", size=16),
}


def backend_format(numerics: Numerics) -> type[QuantizedFormat] | None:
    """The format that keeps weights quantized on a backend; None if it dequantizes all weights."""
    if numerics.backend == "llvm":
        from runtime.quant.llvm_format import LlvmFormat

        return LlvmFormat
    if numerics.backend == "triton" and (numerics.dtype == torch.bfloat16 or INTERPRETED):
        from runtime.quant.triton_format import TritonFormat

        return TritonFormat
    return None


def weight_formats(spec: DecoderSpec, numerics: Numerics | None) -> Callable[[str], WeightFormat]:
    """Return a function from a parameter name in `spec.shapes()` to its format.

    The parts of a fused layer get formats that the backend's kernels multiply as one. Without numerics, formats only
    describe the checkpoint."""
    schemes, shapes = spec.quantization, _shapes(spec)
    # shapes of the tensors in a checkpoint
    whole_shapes = {name: stored_shape(spec, name, shape) for name, shape in _shapes(spec.whole).items()}
    kept = backend_format(numerics) if numerics else None  # the format of weights that stay quantized
    if not schemes:
        return lambda parameter: DENSE

    dense = _taken_apart(spec, shapes, numerics)
    layout_of = cache(lambda scheme: LAYOUTS[scheme.layout](scheme))
    mixtures = _mixtures(spec, whole_shapes)

    def own_encoding(parameter: str) -> Encoding | None:
        scheme = schemes.get(parameter)
        return layout_of(scheme).encoding(whole_shapes[parameter]) if scheme and not scheme.dequantized else None

    def fits(encoding: Encoding, parameter: str) -> bool:
        if kept is None or numerics is None or not kept.takes(encoding):
            return False
        own, whole = shapes[parameter], whole_shapes[parameter]
        pieces = _pieces(spec, parameter, own, whole, numerics.rank_invariant)
        return _has_whole_groups(encoding, whole, pieces) and all(
            encoding.fits(shape) and kept.fits(encoding, shape) for shape in pieces
        )

    @cache
    def agree(names: tuple[str, ...], reordered: bool = False) -> bool:
        encodings = [encoding for name in names if (encoding := own_encoding(name))]
        if reordered:
            encodings = [encoding.by_row for encoding in encodings]
        if kept is None or len(encodings) < len(names) or names[0] in dense:
            return False
        if not kept.mixes and len({encoding.flat for encoding in encodings}) > 1:
            return False
        return all(map(fits, encodings, names))

    @cache
    def format_for(
        scheme: QuantizationScheme, shape: Shape, stay: bool, reordered: bool, is_expert: bool
    ) -> WeightFormat:
        layout = layout_of(scheme)
        encoding = layout.encoding(shape)
        if stay and kept and numerics:
            return kept(layout, encoding, numerics, is_expert, reordered)
        return DequantizedFormat(layout, encoding)

    @cache
    def format_of(parameter: str) -> WeightFormat:
        if parameter == "head" and parameter not in schemes and spec.tied_head:
            parameter = "embed"
        if (scheme := schemes.get(parameter)) is None:
            return DENSE
        is_table = parameter in ("embed", "layer_embed")
        experts = mixtures.get(parameter)
        names, reordered = (experts, False) if experts else _fused_weights(spec, parameter)
        stay = agree(names, reordered) and (not is_table or (kept is not None and kept.table_rows > 0))
        if not stay and (is_table or scheme.layout == PLAIN):
            return DENSE
        return format_for(scheme, whole_shapes[parameter], stay, reordered, bool(experts))

    return format_of


def stored_format(scheme: QuantizationScheme | None, shape: Shape) -> WeightFormat:
    """The format that describes a checkpoint's weight with a scheme and a shape; None for a dense one."""
    if scheme is None:
        return DENSE
    layout = LAYOUTS[scheme.layout](scheme)
    return DequantizedFormat(layout, layout.encoding(shape))


def _taken_apart(spec: DecoderSpec, names: Iterable[str], numerics: Numerics | None) -> set[str]:
    """The parameters that latent attention takes apart into each head's dense matrices.

    A CPU's compiled kernels multiply k_b and v_b as they are."""
    stay = False
    if numerics is not None and (numerics.backend, numerics.dtype) == ("llvm", torch.float32):
        from runtime.kernels.cpu.linear.weight_form import ROWS

        stay = spec.latent is not None and spec.latent.has_whole_blocks(ROWS)
    ends = (".kv_b.weight",) if stay else (".kv_b.weight", ".k_b.weight", ".v_b.weight")
    return {name for name in names if name.endswith(ends)}


def _fused_weights(spec: DecoderSpec, parameter: str) -> tuple[tuple[str, ...], bool]:
    """The weights of the fused layer with this one, which stay quantized together, and whether their rows move."""
    prefix, _, part = parameter.removesuffix(".weight").rpartition(".")
    if not prefix:
        return (parameter,), False
    layer = int(prefix.partition(".")[2])
    for name, (parts, _) in spec.linears(layer).items():
        if part in parts:
            return tuple(f"{prefix}.{part}.weight" for part in parts), spec.layers[layer].mixer.reorders(name)
    return (parameter,), False


def _mixtures(spec: DecoderSpec, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """An expert's weight -> all weights in its mixture, or all shared experts' weights."""
    groups = defaultdict[tuple[str, bool], list[str]](list)
    for name in names:
        layer, _, expert = name.partition(".experts.")
        if expert.endswith(".weight") and spec.experts is not None:
            groups[layer, int(expert.partition(".")[0]) >= spec.experts.num_experts].append(name)
    return {name: together for group in groups.values() if (together := tuple(group)) for name in group}


def _has_whole_groups(encoding: Encoding, whole: Shape, pieces: set[Shape]) -> bool:
    together = encoding.super_size or encoding.group_size or 1
    return all(columns == whole[1] or columns % together == 0 for _, columns in pieces)


def _pieces(spec: DecoderSpec, parameter: str, own: Shape, whole: Shape, in_leaves: bool) -> set[Shape]:
    """The shapes of the ranks' parts of a weight (`own` on this rank), or its leaves' shapes."""
    if in_leaves:
        own_leaves = (leaf for name in ungrouped(parameter) for leaf in leaves_of(spec.whole, name))
        leaves = [(leaf.dim, leaf.stop - leaf.start) for leaf in own_leaves]
        return {(whole[0], size) if dim else (size, whole[1]) for dim, size in leaves}
    if parameter != "head":
        return {own}
    shards = [Shard(rank, spec.shard.size) for rank in range(spec.shard.size)]  # shards may differ in rows
    return {(len(shard.vocabulary(spec.whole.vocab_size)), own[1]) for shard in shards}


def _shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """The shapes of all parameters, with a tied head."""
    return {"head": (spec.vocab_size, spec.hidden_size)} | spec.shapes()


def format_names(spec: DecoderSpec, numerics: Numerics) -> str:
    """The names of the linear layers' formats, the most frequent first."""
    format_of = weight_formats(spec, numerics)
    names = Counter(format_of(name).name for name in spec.shapes() if name == "head" or name.endswith(".weight"))
    return ", ".join(name for name, _ in names.most_common())


def weight_bytes(spec: DecoderSpec, numerics: Numerics) -> int:
    """The bytes of all parameters on the device."""
    format_of = weight_formats(spec, numerics)
    size = sum(format_of(name).device_bytes(shape, numerics) for name, shape in spec.shapes().items())
    head = format_of("head")
    is_table = head.table_rows > 0 and head.joins(format_of("embed"))  # which serves for both
    if (spec.tied_head and "head" not in spec.lent) and (
        numerics.rank_invariant or (not is_table and (numerics.packed or head is not DENSE))
    ):  # it is a second copy of the embedding, in its own layout
        size += head.device_bytes((spec.vocab_size, spec.hidden_size), numerics)
    return size


def staged_bytes(spec: DecoderSpec, numerics: Numerics) -> dict[str, int]:
    """The bytes of each parameter in an update: in the compute dtype, or as its files have it."""
    format_of, schemes = weight_formats(spec, numerics), spec.quantization or {}
    sizes = {}
    for name, shape in spec.shapes().items():
        own = format_of(name)
        is_plain = isinstance(own, DenseFormat) or schemes[name].layout == PLAIN
        sizes[name] = math.prod(shape) * numerics.dtype.itemsize if is_plain else own.device_bytes(shape, numerics)
    return sizes


def dequantized_copy_bytes(spec: DecoderSpec, numerics: Numerics) -> int:
    """The bytes, in the compute dtype, of the largest linear layer that a GPU dequantizes for a product with many rows.

    Products with experts and the head do not dequantize their weights."""
    format_of, shapes = weight_formats(spec, numerics), spec.shapes()
    sizes = [0]
    for layer in range(spec.num_layers):
        for parts, _ in spec.linears(layer).values():
            names = [f"layers.{layer}.{part}.weight" for part in parts]
            if all(name in shapes and _dequantizes(format_of(name), shapes[name]) for name in names):
                sizes.append(sum(math.prod(shapes[name]) for name in names))
    return max(sizes) * numerics.dtype.itemsize


def _dequantizes(weight_format: WeightFormat, shape: Shape) -> bool:
    return isinstance(weight_format, QuantizedFormat) and weight_format.dequantizes(shape)


def encodings_on_device(spec: DecoderSpec, numerics: Numerics) -> dict[str, str]:
    """The encodings of the parameters that stay quantized on the device."""
    format_of = weight_formats(spec, numerics)
    formats = {name: format_of(name) for name in spec.quantization or ()}
    return {name: each.name for name, each in formats.items() if isinstance(each, QuantizedFormat)}


def encodings_at_load(numerics: Numerics) -> list[str]:
    """The encodings to which dense weights can be quantized at load, as this device has products for them."""
    kept = backend_format(numerics)
    encodings = {name: encoding_of(QuantizationScheme(PLAIN, name, group_size=group)) for name, group in GROUPS.items()}
    return [name for name, encoding in encodings.items() if kept is not None and kept.takes(encoding)]


def check_products(spec: DecoderSpec, numerics: Numerics, config: EngineConfig, is_draft: bool = False) -> None:
    """Raise CallboardError if this device lacks products for the settings of `config`.

    That is an encoding without products, leaves without kernels, or a quantized weight that ranks cannot divide."""
    lacking = "mixtures of experts have" if spec.experts else "latent attention has" if spec.latent else ""
    if lacking and numerics.rank_invariant and numerics.backend == "triton":
        raise CallboardError(
            f"rank_invariant is on, for which {lacking} no kernels on a GPU; leave it off, or use kernel_backend=torch."
        )
    encoded = {scheme.encoding for scheme in (spec.quantization or {}).values() if scheme.layout == PLAIN}
    can = encodings_at_load(numerics)
    for field, encoding in requested_encodings(config, is_draft).items():
        if encoding in encoded and encoding not in can:
            where = f"in {numerics.dtype_name} on {numerics.device.type} ({numerics.backend} kernels)"
            raise CallboardError(
                f"{field} is {encoding}, which has no products {where}; {_advice(encoding, numerics)}."
            )
    if (size := spec.shard.size) == 1:
        return
    rank_encodings = encodings_on_device(spec, numerics)
    for name, encoding in encodings_on_device(spec.whole, numerics).items():
        if name not in rank_encodings:
            raise CallboardError(
                f"tensor_parallel_size is {size}, but a rank's {list(_shapes(spec)[name])} of {name} cannot be "
                f"{encoding}; choose another size, or quantization=none."
            )


def _advice(encoding: str, numerics: Numerics) -> str:
    """What to change if this device lacks products for an encoding at load."""
    if can := encodings_at_load(numerics):
        return f"use {' or '.join(can)}"
    if can := encodings_at_load(replace(numerics, dtype=torch.bfloat16)):
        return f"use {' or '.join(can)} with dtype=bfloat16"
    if numerics.device.type == "cpu" and encoding in encodings_at_load(replace(numerics, backend="llvm")):
        return "install llvmlite and leave kernel_backend at auto"
    return "leave it at auto"
