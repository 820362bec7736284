"""ModelTensors: which tensors an update may have, and what they change on a rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.sharding import Part
from runtime.base.types import CallboardError
from runtime.kernels.numerics import Numerics
from runtime.loading.stacked_experts import Place, single_weights
from runtime.models import CLASSIFIER
from runtime.models.kv_scales import KV_SCALES
from runtime.models.weight_map import WeightMap, short_name
from runtime.models.weights import locate_parameters
from runtime.quant.at_load import PLAIN
from runtime.quant.model_formats import weight_formats
from runtime.quant.quantized_formats import DequantizedFormat
from runtime.quant.weight_format import DENSE, Location, Shape, TensorSource
from runtime.updates.slices import Parts, SliceSet, merged, narrowed, parts_by_name

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
HEAD_ROWS = "classifier"  # a classifier's section, which may consist of head rows
TOWER = "tower"  # the image encoder's section
DRAFT_HEAD = "draft head"  # the section of a head that drafts


class Target(NamedTuple):
    """A tensor of the checkpoint that an update may have."""

    name: str  # the checkpoint's name
    shape: Shape
    dtypes: tuple[torch.dtype, ...]  # that it may have; () if it cannot be updated
    parts: Parts  # what this rank needs
    section: str  # the decoder's section: layers.3, embed, head, ...
    is_dense: bool = False  # it replaces a weight that is quantized in the files


class Incoming(NamedTuple):
    """A tensor of an update, with its place."""

    target: Target
    place: Place | None  # place within a tensor that holds all experts; None for a whole tensor


class ModelTensors:
    """The tensors of a model by name."""

    def __init__(
        self,
        spec: DecoderSpec,
        weight_map: WeightMap,
        numerics: Numerics,
        checkpoint: TensorSource,
        parts_read: Mapping[str, Parts],  # while the rank was loaded; others are kept whole
        dense: Iterable[str] = (),  # tensors that replaced quantized weights when the rank was loaded
        head: Mapping[str, Parts] = {},  # read for a head that drafts
    ) -> None:
        self._spec, self._weight_map = spec, weight_map
        self.locations = locate_parameters(spec, weight_map, checkpoint)
        self.format_of = weight_formats(spec, numerics)
        self._stored: dict[str, Target] = {}
        self._dense: dict[str, Target] = {}
        self._of_parameter: dict[str, tuple[str, list[str]]] = {}  # -> dense name, stored names
        replaced = set(dense)
        for parameter, location in self.locations.items():
            self._add(parameter, location, checkpoint, parts_read, replaced)
        self._has_classifier = CLASSIFIER in checkpoint and CLASSIFIER in parts_read
        if self._has_classifier:
            self._stored[CLASSIFIER] = Target(CLASSIFIER, checkpoint.shape(CLASSIFIER), FLOATS, (None,), HEAD_ROWS)
        self._tower = parts_read.keys() - self._stored.keys() - self._dense.keys()
        for name in self._tower:
            self._stored[name] = Target(name, checkpoint.shape(name), FLOATS, (None,), TOWER)
        self._head = head.keys()
        for name, parts in head.items():
            own = checkpoint.dtype(name)
            dtypes = FLOATS if own in FLOATS else (own,)
            self._stored[name] = Target(name, checkpoint.shape(name), dtypes, parts, DRAFT_HEAD)
        names = self._stored.keys() | self._dense.keys()
        counts = Counter(map(short_name, names))
        self._by_short_name = {short: name for name in names if counts[short := short_name(name)] == 1}
        self._others = {name for name in checkpoint.names() if name not in names}

    def _add(
        self,
        parameter: str,
        location: Location,
        checkpoint: TensorSource,
        parts_read: Mapping[str, Parts],
        replaced: set[str],
    ) -> None:
        weight_format, section = self.format_of(parameter), _section_of(parameter)
        scheme = (self._spec.quantization or {}).get(parameter)
        takes_floats = weight_format is DENSE or (scheme is not None and scheme.layout == PLAIN)
        is_gguf = scheme is not None and scheme.layout.startswith("gguf") and not takes_floats
        stored = [name for name in weight_format.stored(location) if name in checkpoint]
        for name in stored:
            own = checkpoint.dtype(name)
            dtypes = tuple(dict.fromkeys((*FLOATS, own))) if takes_floats else () if is_gguf else (own,)
            parts = (None,) if name in replaced else parts_by_name(parts_read, name)
            self._stored[name] = Target(name, checkpoint.shape(name), dtypes, parts, section)
        dense_name = ""
        if not takes_floats:
            dense_name = location.name
            ((_, wanted),) = DENSE.stored(location).items()
            assert wanted.shape is not None
            wanted_parts: list[Part | None] = [
                part._replace(dim=part.dim ^ location.transposed) for part in location.parts
            ]
            if location.place is not None and dense_name in self._dense:  # other parameters' parts
                wanted_parts += self._dense[dense_name].parts
            parts = merged(wanted_parts, wanted.shape) if wanted_parts else (None,)
            dtypes = FLOATS if isinstance(weight_format, DequantizedFormat) else ()
            self._dense[dense_name] = Target(dense_name, wanted.shape, dtypes, parts, section, is_dense=True)
        self._of_parameter[parameter] = dense_name, stored

    def find(self, name: str, dtype: torch.dtype, shape: Shape) -> list[Incoming]:
        """The places of an update's tensor; [] for one that the model does not need.

        Raises CallboardError if the model lacks the tensor, or has it with another type or shape."""
        if (target := self._find(name, dtype)) is not None:
            return [Incoming(_checked(target, name, dtype, shape), None)]
        singles = single_weights(name, shape, self._weight_map.experts_in_turn, self._spec.hidden_size)
        found = [Incoming(target, place) for one, place in singles.items() if (target := self._find(one, dtype))]
        if singles and len(found) == len(singles):
            for target, place in found:
                _checked(target, name, dtype, place.shape(shape) if place else shape)
            return found
        if self._is_ignored(name):
            return []
        raise CallboardError(
            f"The model has no tensor {name}, which the update brings; use the names of the checkpoint's files."
        )

    def _find(self, name: str, dtype: torch.dtype) -> Target | None:
        base = self._weight_map.base
        for own in (name, base + name, name.removeprefix(base), self._by_short_name.get(short_name(name), "")):
            stored, dense = self._stored.get(own), self._dense.get(own)
            if stored is not None and stored.section == DRAFT_HEAD and dtype not in stored.dtypes:
                continue  # a head keeps its weights if the update has another type
            if stored is not None and (dense is None or dtype in stored.dtypes):
                return stored
            if dense is not None:
                return dense
        return None

    def _is_ignored(self, name: str) -> bool:
        """True for tensors that the model does not read: rotary frequencies, an image encoder that is off, a copy of a
        tied head."""
        weight_map = self._weight_map
        short = name.removeprefix(weight_map.base)
        own = {name, weight_map.base + name} & self._head  # another type than the head's
        if name in self._others or own or re.fullmatch(f"{weight_map.unread}|{KV_SCALES}", short):
            return True
        return self._spec.tied_head and short_name(short) == short_name(weight_map.names["head"])

    def is_complete(self, staged: SliceSet, older: Iterable[SliceSet] = ()) -> bool:
        """True if an update has every tensor of the model, or all but an image encoder that no `older` one changed."""
        seen, has_tower = staged.seen, any(self._tower & each.of.keys() for each in older)
        if (self._has_classifier and CLASSIFIER not in seen) or (has_tower and not seen >= self._tower):
            return False
        return all(dense in staged.dense or seen.issuperset(stored) for dense, stored in self._of_parameter.values())

    def missing(self, staged: SliceSet) -> str:
        """The first tensor of the model that an update lacks; empty if it has all."""
        lacking = (name for _, stored in self._of_parameter.values() for name in stored if name not in staged.seen)
        return next(lacking, "")

    def draft_head(self, staged: SliceSet) -> str:
        """What an update does to a head that drafts: updated, partly or kept."""
        if not (found := self._head & staged.seen):
            return "kept"
        return "updated" if found == self._head else "partly"

    def sections(self, staged: SliceSet) -> set[str]:
        """The parts of the decoder that change."""
        targets = (self._dense[name] if name in staged.dense else self._stored[name] for name in staged.of)
        found = {target.section for target in targets}
        if found & {"head", "embed"}:
            found.add(HEAD_ROWS)
        return found


def pieces_of(found: Iterable[Incoming], tensor: torch.Tensor) -> Iterable[tuple[Target, int, torch.Tensor]]:
    """Each slice of a whole tensor that the rank needs: its target, the part's index, and a view."""
    for target, place in found:
        own = tensor if place is None else place.of(tensor)
        for i, part in enumerate(target.parts):
            yield target, i, narrowed(own, part)


def _section_of(parameter: str) -> str:
    """The part of a decoder that is built again for a parameter."""
    if parameter.startswith("layers."):
        return ".".join(parameter.split(".")[:2])
    if parameter.startswith("layer_embed"):
        return "layer_embed"
    return parameter.removesuffix("_bias")


def _checked(target: Target, name: str, dtype: torch.dtype, shape: Shape) -> Target:
    type_name = str(dtype).removeprefix("torch.")
    if not target.dtypes:
        raise CallboardError(
            f"Tensor {name} of the update is {type_name}, but the model's weight is quantized in its files; start the "
            "server with quantization=none, or with a checkpoint that is not quantized."
        )
    if dtype not in target.dtypes:
        known = " or ".join(str(each).removeprefix("torch.") for each in target.dtypes)
        raise CallboardError(f"Tensor {name} of the update is {type_name}; the model needs {known}.")
    if shape != target.shape:
        raise CallboardError(
            f"Tensor {name} of the update has shape {list(shape)}; the model has {list(target.shape)}."
        )
    return target
