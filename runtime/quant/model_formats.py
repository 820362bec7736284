"""The weight formats of a whole model, and what is derived from them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch

from runtime.kernels.numerics import Numerics
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
from runtime.quant.products import lacks_vector_code, products_of
from runtime.quant.quantized_formats import DequantizedFormat, QuantizedFormat
from runtime.quant.scheme import QuantizationScheme
from runtime.quant.weight_format import DENSE, Shape, WeightFormat
from runtime.spec.config import EngineConfig
from runtime.spec.decoder_spec import DecoderSpec
from runtime.spec.sharding import Shard, leaves_of
from runtime.spec.types import CallboardError

LAYOUTS: dict[str, Callable[[QuantizationScheme], CheckpointLayout]] = {  # by the scheme's
    "compressed-tensors": OneByOne,
    "compressed-tensors packed": PackedWords,
    "compressed-tensors nvfp4": partial(
        Nibbles, codes="weight_packed", scale="weight_scale", of_tensor="weight_global_scale", divides=True
    ),
    "compressed-tensors mxfp4": partial(Nibbles, codes="weight_packed", scale="weight_scale"),
    "fp8": partial(OneByOne, scales=("weight_scale_inv", "weight_scale")),
    "awq": Awq,
    "gptq": partial(Gptq, less=1),
    "gptq_v2": partial(Gptq, less=0),
    # The library multiplies by 1 / 127 in these digits.
    "bitsandbytes int8": partial(OneByOne, scales=("SCB",), factor=7.874015718698502e-3),
    "bitsandbytes": partial(BitsAndBytes4, nested=False),
    "bitsandbytes nested": partial(BitsAndBytes4, nested=True),
    "modelopt fp8": OneByOne,
    "modelopt nvfp4": partial(Nibbles, codes="weight", scale="weight_scale", of_tensor="weight_scale_2"),
    PLAIN: Plain,
    **dict.fromkeys((f"gguf {name}" for name in TYPES), GgufBlocks),
    "mxfp4": partial(Nibbles, codes="weight_blocks", scale="weight_scales", size=16),
}


def weight_formats(spec: DecoderSpec, numerics: Numerics | None) -> Callable[[str], WeightFormat]:
    """The format of each parameter of `spec.shapes()` by name; the parts of a fused map get one that joins.

    Without numerics, for what is stored in a checkpoint alone."""
    schemes, shapes, whole_shapes = spec.quantization, _shapes(spec), _shapes(spec.whole)
    products = products_of(numerics) if numerics else None
    if not schemes:
        return lambda parameter: DENSE

    layout_of = cache(lambda scheme: LAYOUTS[scheme.layout](scheme))
    linears = [parts for parts, _ in spec.linears().values()]

    of_experts = defaultdict(list)  # layer -> the weights of its experts
    for name in whole_shapes:
        layer, experts, _ = name.partition(".experts.")
        if experts:
            of_experts[layer].append(name)

    def own_form(parameter: str) -> Encoding | None:
        scheme = schemes.get(parameter)
        return layout_of(scheme).form(whole_shapes[parameter]) if scheme and not scheme.dequantized else None

    def fits(form: Encoding, parameter: str) -> bool:
        if products is None or numerics is None:
            return False
        own, whole = shapes[parameter], whole_shapes[parameter]
        pieces = _pieces(spec, parameter, own, whole, numerics.rank_invariant)
        has_whole_groups = all(n == whole[1] or n % (form.group_size or 1) == 0 for _, n in pieces)
        return has_whole_groups and all(form.fits(shape) and products.fits(form, shape) for shape in pieces)

    @cache
    def agree(names: tuple[str, ...]) -> bool:
        form = own_form(names[0])
        if (
            form is None
            or products is None
            or not products.takes(form)
            or (form.scale_rows > 1 and spec.rope.reorders_heads)
        ):
            return False
        return all(own_form(name) == form and fits(form, name) for name in names)

    def stays(parameter: str) -> bool:
        """True if a weight can be codes on the device: it and what it is multiplied with at once are in one form, which
        products there take. These are the parts of a fused map, and of a mixture all experts of the layer."""
        prefix, _, part = parameter.removesuffix(".weight").rpartition(".")
        layer, experts, _ = parameter.partition(".experts.")
        parts = next((parts for parts in linears if part in parts), None)
        if experts:
            return agree(tuple(of_experts[layer]))
        return agree(tuple(f"{prefix}.{part}.weight" for part in parts) if parts else (parameter,))

    @cache
    def of_kind(scheme: QuantizationScheme, shape: Shape, stay: bool) -> WeightFormat:
        layout = layout_of(scheme)
        form = layout.form(shape)
        return QuantizedFormat(layout, form, products) if stay and products else DequantizedFormat(layout, form)

    @cache
    def format_of(parameter: str) -> WeightFormat:
        if (scheme := schemes.get(parameter)) is None:
            return DENSE
        stay = stays(parameter)
        return DENSE if scheme.layout == PLAIN and not stay else of_kind(scheme, whole_shapes[parameter], stay)

    return format_of


def _pieces(spec: DecoderSpec, parameter: str, own: Shape, whole: Shape, in_leaves: bool) -> set[Shape]:
    """The shapes of what ranks have of a weight, of which this one has `own`; or those of the weight's leaves."""
    if in_leaves:
        leaves = [(leaf.dim, leaf.stop - leaf.start) for leaf in leaves_of(spec.whole, parameter)]
        return {(whole[0], size) if dim else (size, whole[1]) for dim, size in leaves}
    if parameter != "head":
        return {own}
    shards = [Shard(rank, spec.shard.size) for rank in range(spec.shard.size)]  # with different numbers of rows
    return {(len(shard.vocabulary(spec.whole.vocab_size)), own[1]) for shard in shards}


def _shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """The shapes of all parameters, a tied head's among them."""
    return {"head": (spec.vocab_size, spec.hidden_size)} | spec.shapes()


def format_names(spec: DecoderSpec, numerics: Numerics) -> str:
    """The formats of a model's linear maps, that of most maps first."""
    format_of = weight_formats(spec, numerics)
    names = Counter(format_of(name).name for name in spec.shapes() if name == "head" or name.endswith(".weight"))
    return ", ".join(name for name, _ in names.most_common())


def weight_bytes(spec: DecoderSpec, numerics: Numerics) -> int:
    """The bytes of all parameters on the device."""
    format_of = weight_formats(spec, numerics)
    size = sum(format_of(name).device_bytes(shape, numerics) for name, shape in spec.shapes().items())
    head = format_of("head")
    if spec.tied_head and (
        numerics.packed or numerics.rank_invariant or head is not DENSE
    ):  # it is a second copy of the embedding, in its layout
        size += head.device_bytes((spec.vocab_size, spec.hidden_size), numerics)
    return size


def dequantized_copy_bytes(spec: DecoderSpec, numerics: Numerics) -> int:
    """The bytes, in the compute dtype, of the largest linear map of which a GPU's product of many rows makes a dense
    copy: those of experts and of the head do not."""
    format_of, shapes = weight_formats(spec, numerics), spec.shapes()
    sizes = [0]
    for layer in range(spec.num_layers):
        for parts, _ in spec.linears().values():
            names = [f"layers.{layer}.{part}.weight" for part in parts]
            if all(name in shapes and _dequantizes(format_of(name), shapes[name]) for name in names):
                sizes.append(sum(math.prod(shapes[name]) for name in names))
    return max(sizes) * numerics.dtype.itemsize


def _dequantizes(weight_format: WeightFormat, shape: Shape) -> bool:
    return isinstance(weight_format, QuantizedFormat) and weight_format.dequantizes(shape)


def encodings_on_device(spec: DecoderSpec, numerics: Numerics) -> dict[str, str]:
    """The forms of the parameters that are codes on the device."""
    format_of = weight_formats(spec, numerics)
    formats = {name: format_of(name) for name in spec.quantization or ()}
    return {name: each.name for name, each in formats.items() if isinstance(each, QuantizedFormat)}


def encodings_at_load(numerics: Numerics) -> list[str]:
    """The forms that plain weights can become as they are read, as something multiplies with them on this device."""
    products = products_of(numerics)
    forms = {name: encoding_of(QuantizationScheme(PLAIN, name, group_size=group)) for name, group in GROUPS.items()}
    return [name for name, form in forms.items() if products is not None and products.takes(form)]


def check_products(spec: DecoderSpec, numerics: Numerics, config: EngineConfig, is_draft: bool = False) -> None:
    """Raises CallboardError if `config` asks for a form of plain weights that has no products here, or if codes of the
    whole model cannot be those of its ranks, or if nothing computes in leaves."""
    if numerics.rank_invariant and numerics.backend == "triton" and spec.experts is not None:
        raise CallboardError(
            "rank_invariant is on, for which mixtures of experts have no kernels on a GPU; leave it off, or use "
            "kernel_backend=torch."
        )
    encoded = {scheme.encoding for scheme in (spec.quantization or {}).values() if scheme.layout == PLAIN}
    can = encodings_at_load(numerics)
    for field, form in requested_encodings(config, is_draft).items():
        if form in encoded and form not in can:
            in_half = encodings_at_load(replace(numerics, dtype=torch.bfloat16))
            advice = f"use {' or '.join(can or in_half)}{'' if can else ' with dtype=bfloat16'}"
            where = f"in {numerics.dtype_name} on {numerics.device.type} ({numerics.backend} kernels)"
            if lacks_vector_code(numerics):
                where = "on a CPU without AVX2 and AVX-512"
            raise CallboardError(
                f"{field} is {form}, which nothing multiplies with {where}; "
                f"{advice if can or in_half else 'leave it at auto'}."
            )
    if (size := spec.shard.size) == 1:
        return
    of_rank = encodings_on_device(spec, numerics)
    for name, form in encodings_on_device(spec.whole, numerics).items():
        if name not in of_rank:
            raise CallboardError(
                f"tensor_parallel_size is {size}, but a rank's {list(_shapes(spec)[name])} of {name} cannot be {form} "
                "codes; choose another size, or quantization=none."
            )
