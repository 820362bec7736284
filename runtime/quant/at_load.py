"""Quantization at load: settings that quantize dense weights, or dequantize quantized ones, as they are read.

This module does not import torch, so that unsupported settings are refused before anything is loaded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec, chooses_experts
from runtime.base.model.sharding import leaves_of
from runtime.base.shard import Shard
from runtime.base.types import CallboardError
from runtime.quant.scheme import QuantizationScheme

PLAIN = "plain"  # layout of dense weights that are quantized as they are read
GROUPS = {"fp8": 0, "int8": 0, "int4": 128, "nf4": 64}  # encoding -> columns that share a scale; 0 for all
_OF_HEAD = ("fp8", "int8")  # encodings that a head can have
_WITH_HEAD = ("int8", "int4")  # encodings with which a dense head would take much of a CPU's step
_DENSE = ("mix_b", "mix_a", "mix_ba", "kv_b")  # parts that are never quantized at load: gates and latents
_WHOLE, _SMALL = 128, 32  # a column count that all group sizes divide, and the group size otherwise
_GROUP_ON_CPU = 32  # int4's group size, more exact than 128, at the same speed


def requested_encodings(config: EngineConfig, is_draft: bool = False) -> dict[str, str]:
    """The encodings that `config` sets for linear layers and for the head, by the field that the user sets."""
    maps_field = "draft_quantization" if is_draft else "quantization"  # `draft_config` copies it into `quantization`
    return {maps_field: config.quantization, "head_quantization": config.head_quantization}


def quantized_at_load(spec: DecoderSpec, config: EngineConfig, device: str = "", is_draft: bool = False) -> DecoderSpec:
    """The spec with the schemes that `config` sets for its linear layers and its head on a device type.

    Embedding, routers, norms and biases do not change. Neither does a tied head, unless head_quantization names an
    encoding. On a CPU, int8 and int4 imply an int8 head if the checkpoint's is dense. They also imply int8 layer
    embeddings. Raises CallboardError if the checkpoint already has another encoding."""
    schemes: dict[str, QuantizationScheme] = dict(spec.quantization or {})
    maps = _maps(spec)
    fields = requested_encodings(config, is_draft)
    maps_encoding, head_encoding = fields.values()
    if maps_encoding == "none" and head_encoding == "auto":
        head_encoding = "none"
    head = "embed" if spec.tied_head and "head" not in schemes else "head"  # where the checkpoint has it
    if device == "cpu" and maps_encoding in _WITH_HEAD and head_encoding == "auto" and head not in schemes:
        head_encoding = "int8"
    for field, encoding, names in zip(fields, (maps_encoding, head_encoding), (maps, ["head"]), strict=True):
        stored = {name: schemes[name] for name in names if name in schemes}
        if encoding == "none":
            schemes |= {name: replace(scheme, dequantized=True) for name, scheme in stored.items()}
        elif encoding != "auto" and stored:
            _check_stored(field, encoding, stored)
        elif encoding != "auto":
            schemes |= schemes_at_load(spec, config, encoding, device, names)
    if spec.layer_embed_size and device == "cpu" and maps_encoding in _WITH_HEAD and "layer_embed" not in schemes:
        schemes |= schemes_at_load(spec, config, "int8", device, ["layer_embed"])
    if "embed" in schemes and (head_encoding if spec.tied_head else maps_encoding) == "none":
        schemes["embed"] = replace(schemes["embed"], dequantized=True)
    return replace(spec, quantization=schemes or None)


def schemes_at_load(
    spec: DecoderSpec, config: EngineConfig, encoding: str, device: str, names: list[str] | None = None
) -> dict[str, QuantizationScheme]:
    """The schemes of these weights in an encoding, for a device type; None for all linear layers."""
    of_rank = spec.of_rank(Shard(0, config.tensor_parallel_size))
    found = _maps(spec) if names is None else names
    own = [name for name in found if name.removesuffix(".weight").rpartition(".")[2] not in _DENSE]
    return _schemes(of_rank, own, encoding, config.rank_invariant, device == "cpu")


def _maps(spec: DecoderSpec) -> list[str]:
    return [name for name in spec.shapes() if name.endswith(".weight") and not chooses_experts(name)]


def _check_stored(field: str, encoding: str, stored: Mapping[str, QuantizationScheme]) -> None:
    """Raise CallboardError unless `encoding` is the encoding of most weights in the checkpoint."""
    (most, _), *others = Counter(scheme.encoding for scheme in stored.values()).most_common()
    if most != encoding:
        found = ", ".join([most, *(other for other, _ in others)])
        keep = most if most in (_OF_HEAD if field == "head_quantization" else GROUPS) else "auto"
        raise CallboardError(
            f"{field} is {encoding}, but the checkpoint's weights are {found} already; use {keep} to keep them, "
            "none to dequantize them, or a checkpoint with weights in bfloat16."
        )


def _schemes(
    spec: DecoderSpec, names: list[str], encoding: str, in_leaves: bool, on_cpu: bool
) -> dict[str, QuantizationScheme]:
    """Schemes with groups that divide a rank's columns, or its leaves'.

    A layer's experts get equal schemes."""
    shapes, schemes = {"head": (spec.vocab_size, spec.hidden_size)} | spec.shapes(), dict[str, QuantizationScheme]()
    columns = defaultdict[str, int](int)
    for name in names:
        leaves = leaves_of(spec, name) if in_leaves else []
        own = [leaf.stop - leaf.start for leaf in leaves if leaf.dim == 1] or [shapes[name][1]]
        columns[_together(name)] = gcd(columns[_together(name)], *own)
    size, dtype = GROUPS[encoding], "float32"
    if on_cpu and encoding in _WITH_HEAD:  # half the scale bytes, at the same accuracy
        size, dtype = _GROUP_ON_CPU if encoding == "int4" else size, "bfloat16"
    for name in names:
        is_whole = columns[_together(name)] % _WHOLE == 0
        group_size = size if is_whole else min(size, _SMALL)
        schemes[name] = QuantizationScheme(PLAIN, encoding, group_size=group_size, scale_dtype=dtype)
    return schemes


def _together(name: str) -> str:
    """A weight's name, or its layer's name for an expert's weight."""
    layer, experts, _ = name.partition(".experts.")
    return layer if experts else name
