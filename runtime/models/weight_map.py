"""How a family's checkpoints store a decoder: the names of their tensors, and what is stored otherwise than used."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from runtime.core.decoder_spec import DecoderSpec
from runtime.core.types import CallboardError

_PARAMETER = re.compile(r"(?:layers\.(\d+)\.)?(?:experts\.(\d+)\.)?(\w+)(\.weight|\.bias)?")


class Tensors(Protocol):
    """What is there to be read, of a checkpoint."""

    def names(self) -> Sequence[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Our parameter -> the checkpoint's tensor, and how to read it.

    In a name the first {} is the layer, the second the expert; .weight or .bias follows a linear map's name."""

    names: Mapping[str, str]
    base: str = ""  # what some exports put before the names
    transposed: bool = False  # linear maps are stored as [in, out]
    norms_plus_one: bool = False  # a norm multiplies by one more than is stored
    ignored: str = r".*rotary_emb\.inv_freq"  # tensors without a place; old exports carry rotary frequencies

    def names_of(self, spec: DecoderSpec) -> dict[str, str]:
        """Every parameter of the spec -> its tensor, without `base`."""
        sources = {}
        for parameter in spec.shapes():
            layer, expert, part, suffix = _PARAMETER.fullmatch(parameter).groups("")
            sources[parameter] = self.names[part].format(layer, expert) + suffix
        return sources

    def find(self, spec: DecoderSpec, checkpoint: Tensors) -> dict[str, str]:
        """Every parameter of the spec -> its tensor as the checkpoint calls it.

        Raises CallboardError for the first that is missing, has another shape, or has no place in the model."""
        stored = {name.removeprefix(self.base): name for name in checkpoint.names()}
        sources = self.names_of(spec)
        for parameter, shape in spec.shapes().items():
            name = sources[parameter]
            if self.transposed and parameter.endswith(".weight"):
                shape = shape[::-1]
            if name not in stored:
                raise CallboardError(f"The checkpoint lacks tensor {name}; its config asks for shape {list(shape)}.")
            if (found := tuple(checkpoint.shape(stored[name]))) != shape:
                raise CallboardError(
                    f"Tensor {stored[name]} has shape {list(found)}; the checkpoint's config asks for {list(shape)}."
                )
        extra = {name for name in set(stored) - set(sources.values()) if not re.fullmatch(self.ignored, name)}
        if spec.tied_head:
            extra.discard(self.names["head"])  # some exports have a copy of the embedding there
        if extra:
            raise CallboardError(
                f"Tensor {stored[min(extra)]} of the checkpoint has no place in the model that its config describes."
            )
        return {parameter: stored[name] for parameter, name in sources.items()}
