"""apply_sections: gives a decoder new weights, one layer at a time.

On a GPU new numbers are copied onto the old ones, because CUDA graphs hold their addresses. On a CPU the layer itself
is replaced: its form may depend on the numbers."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext, suppress
from typing import Any

import torch

from runtime.base.types import CallboardError
from runtime.kernels.linear import weight_memory
from runtime.models.decoder import Decoder
from runtime.models.decoder_build import LayerBuilder
from runtime.updates.in_place import InPlace


@torch.no_grad()
def taken(old: Any, new: Any, in_place: bool) -> Any:
    """Return the object that serves new weights: on a GPU the old one, because sleep gives its memory back."""
    if in_place:
        with suppress(CallboardError):  # plain numbers differ, such as the limits of a map's inputs
            InPlace().copy_onto(old, new, "new weights")
            return old
    return new


@torch.no_grad()
def apply_sections(decoder: Decoder, builder: LayerBuilder, sections: Collection[str]) -> None:
    """Build these sections of a decoder again and take their weights. No step runs meanwhile.

    Args:
    builder: reads the new weights, with the decoder's kernels and communicator.
    sections: layers.3, embed, layer_embed, positions, final_norm or head. Other names are ignored."""
    device = decoder.numerics.device
    if decoder.numerics.backend != "triton":
        with weight_memory.recycling():
            _replace_sections(decoder, builder, sections)
        return
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        _copy_sections(decoder, builder, sections)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copy_sections(decoder: Decoder, builder: LayerBuilder, sections: Collection[str]) -> None:
    for i, layer in enumerate(decoder.layers):
        if f"layers.{i}" in sections:
            InPlace().copy_onto(layer, builder.layer(i), f"layers.{i}")
    if "positions" in sections:
        InPlace().copy_onto(decoder.position_embed, builder.positions(), "positions")
    if "layer_embed" in sections:
        InPlace().copy_onto(decoder.layer_embed, builder.layer_embed(), "layer_embed")
    if "final_norm" in sections:
        InPlace().copy_onto((decoder.final_norm, decoder.head_norm), builder.final_norms(), "final_norm")
    is_tied, in_place = decoder.spec.tied_head, InPlace()  # a tied head may be the embedding's own tensor
    if "embed" in sections:
        embed = builder.maps.embedding()
        in_place.copy_onto((decoder.embed, decoder.embed_tokens), tuple(embed), "embed")
        if is_tied:
            in_place.copy_onto(decoder.head, builder.maps.head(embed.table), "head")
    if "head" in sections and not is_tied:
        in_place.copy_onto(decoder.head, builder.maps.head(decoder.embed), "head")


def _replace_sections(decoder: Decoder, builder: LayerBuilder, sections: Collection[str]) -> None:
    """Each old layer ends before the new one is built, which takes its memory."""
    for i in range(len(decoder.layers)):
        if f"layers.{i}" in sections:
            decoder.layers.pop(i)
            decoder.layers.insert(i, builder.layer(i))
    if "positions" in sections:
        decoder.position_embed = builder.positions()
    if "layer_embed" in sections:
        decoder.layer_embed = builder.layer_embed()
    if "final_norm" in sections:
        decoder.final_norm, decoder.head_norm = builder.final_norms()
    is_tied = decoder.spec.tied_head
    if "embed" in sections:
        decoder.embed, decoder.embed_tokens = builder.maps.embedding()
    if "embed" in sections if is_tied else "head" in sections:
        del decoder.head
        decoder.head = builder.maps.head(decoder.embed)
