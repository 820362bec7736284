"""How a family's checkpoints store a decoder: the names of their tensors, and how they differ from the parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from runtime.base.model.decoder_spec import DecoderSpec

_PARAMETER = re.compile(r"(?:layers\.(\d+)\.)?(?:experts\.(\d+)\.)?(\w+)(\.weight|\.bias)?")
# Image encoders, which towers/tower.py reads
TOWERS = r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|connector|embed_vision)\..*"
_WRAPPERS = re.compile(r"^(?:(?:model|language_model|transformer)\.)+")


def short_name(module: str) -> str:
    """A module's name without the wrappers around the layers, which versions of transformers name differently."""
    return _WRAPPERS.sub("", module)


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Our parameter -> the checkpoint's tensor, and how to read it.

    In a name the first {} is the layer, the second the expert; .weight or .bias follows a linear map's name. Keys for
    shared experts, which have one tensor together (sharding.place_in_tensor), are such as shared.up. Keys for a
    mixture's first layers, with an ordinary feed-forward layer, are such as dense.up. A family that has
    models with and without experts has expert keys such as routed.up."""

    names: Mapping[str, str]
    base: str = ""  # prefix that some exports have before all names
    transposed: bool = False  # linear maps are stored as [in, out]
    norms_plus_one: bool = False  # a norm, but for a mixer's own, multiplies by one more than is stored
    experts_in_turn: bool = False  # tensors with all experts have gate and up rows in turn (loading/stacked_experts.py)
    first_layer: int = 0  # the index that names have for the spec's first layer
    ignored: str = r".*rotary_emb\.inv_freq"  # tensors without a reader; old exports have rotary frequencies

    def inside(self, base: str) -> WeightMap:
        """Return the map of a model that has this one at `base`, in place of `model.`."""
        return replace(self, names={part: name.removeprefix("model.") for part, name in self.names.items()}, base=base)

    def names_of(self, spec: DecoderSpec) -> dict[str, str]:
        """Every parameter of the spec -> its tensor, without `base`."""
        return {parameter: self.name_of(spec, parameter) for parameter in spec.shapes()}

    def tensors_of(self, spec: DecoderSpec) -> dict[str, list[str]]:
        """Map every tensor, without `base`, to the spec's parameters in it, in the order of their parts."""
        found: dict[str, list[str]] = {}
        for parameter, name in self.names_of(spec).items():
            found.setdefault(name, []).append(parameter)
        return found

    @property
    def unread(self) -> str:
        """Pattern of tensors that the decoder does not read."""
        return f"{self.ignored}|{TOWERS}"

    def is_ignored(self, name: str) -> bool:
        """Return True for a tensor or a map that is not read."""
        return re.fullmatch(self.unread, name.removeprefix(self.base)) is not None

    def adds_one(self, parameter: str) -> bool:
        """Return True for a norm that multiplies by one more than is stored."""
        return self.norms_plus_one and parameter.endswith("norm") and not parameter.endswith("mix_norm")

    def name_of(self, spec: DecoderSpec, parameter: str) -> str:
        """The tensor of a parameter, without `base`."""
        match = _PARAMETER.fullmatch(parameter)
        assert match, parameter
        layer, expert, part, suffix = match.groups("")
        if spec.experts and expert and int(expert) >= spec.experts.num_experts:
            part = f"shared.{part}"
        elif spec.experts and not expert and f"dense.{part}" in self.names:
            part = f"dense.{part}"
        elif expert and f"routed.{part}" in self.names:
            part = f"routed.{part}"
        return self.names[part].format(int(layer) + self.first_layer if layer else "", expert) + suffix
