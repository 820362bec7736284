"""Finds a head in a checkpoint: its spec, its tensors' names, and what Callboard refuses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime.base.model.decoder_spec import DecoderSpec, chooses_experts
from runtime.base.model.head_spec import HeadSpec
from runtime.base.types import CallboardError
from runtime.models.checkpoint_model import are_equal, stored_name
from runtime.models.decoder import Decoder
from runtime.models.heads.build import build_head
from runtime.models.heads.head import DraftHead
from runtime.models.heads.mtp import mtp_spec
from runtime.models.heads.names import copies_of, head_map
from runtime.models.weight_map import WeightMap
from runtime.models.weights import fault_of, locate_parameters, reader, whole_locations
from runtime.quant import parse_schemes
from runtime.quant.model_formats import stored_format, weight_formats
from runtime.quant.scheme import QuantizationScheme
from runtime.quant.weight_format import TensorSource

# Fields for another forward pass, and the values that MtpHead has
_FLAGS = {
    "mtp_hidden_states_first": (None, False),
    "chain_hidden_post_norm": (None,),
    "mtp_use_dedicated_embeddings": (None, False),
}
_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
_OTHER_PASS = re.compile(r"(?:.*\.)?mtp\.(fc_embedding|fc_hidden)\..*")  # qwen4_exp
_SCALES = (torch.float8_e4m3fn, torch.float8_e5m2)
_FP8_BLOCKS = QuantizationScheme("fp8", "fp8", 128, 128)  # which files with another scheme may have in a head


@dataclass(frozen=True)
class CheckpointHead:
    """A head in the tensors of a checkpoint (HeadSource)."""

    spec: HeadSpec
    weight_map: WeightMap
    tensors: TensorSource
    fingerprint: str
    copies: tuple[tuple[str, str], ...] = ()  # tensors that must equal the target's, which it uses in their place

    def load(
        self, target: Decoder, spec: HeadSpec, num_positions: int, updated: TensorSource | None = None
    ) -> DraftHead:
        """Read the weights, after a check of all tensors."""
        for copy, original in self.copies:
            if not are_equal(self.tensors, copy, original):
                raise CallboardError(f"draft is mtp, but {copy} differs from {original}, which heads share.")
        return self.read(target, spec, num_positions, updated or self.tensors)

    def read(self, target: Decoder, spec: HeadSpec, num_positions: int, tensors: TensorSource) -> DraftHead:
        """Read the weights from the checkpoint's tensors, perhaps with updates over them."""
        locations = locate_parameters(spec.decoder, self.weight_map, self.tensors)
        format_of = weight_formats(spec.decoder, target.numerics)
        read = reader(tensors, locations, format_of, self.weight_map, target.numerics)
        return build_head(spec, target, read, num_positions)


def brings_head(config: Mapping[str, Any], names: Iterable[str], num_layers: int, weight_map: WeightMap) -> bool:
    """True if a checkpoint's config or tensors have a head, whether this build runs it or not."""
    begin, text = _begin(head_map(weight_map, num_layers)), {**config, **(config.get("text_config") or {})}
    has_tensors = any(name.removeprefix(weight_map.base).startswith(begin) for name in names)
    return has_tensors or any(text.get(field) for field in _COUNTS)


def _begin(names: WeightMap) -> str:
    """What the names of a head's tensors begin with."""
    layer = names.names["attn_norm"].partition("{}")[0]
    return "mtp." if layer.startswith("mtp.") else f"{layer}{names.first_layer}."


def checkpoint_head(
    config: Mapping[str, Any], tensors: TensorSource, fingerprint: str, target: DecoderSpec, weight_map: WeightMap
) -> CheckpointHead:
    """The head that a target's checkpoint brings. Raises CallboardError, with a name, if it has none that runs."""
    names = head_map(weight_map, target.num_layers)
    _check_tensors(tensors, names, target.num_layers)
    text = {**config, **(config.get("text_config") or {})}
    for flag, known in _FLAGS.items():
        if text.get(flag) not in known:
            raise CallboardError(f"draft is mtp, but the model's {flag} is {text[flag]}, which is not supported.")
    if (field := next((field for field in _COUNTS if (text.get(field) or 0) > 1), None)) is not None:
        raise CallboardError(f"draft is mtp, but the model's {field} is {text[field]}; only 1 is supported.")
    spec = stated_head(config, target, weight_map)
    stated, stored = spec.decoder.quantization or {}, (target.quantization or {}).values()
    schemes = _stored_schemes(stated, stored, tensors, spec.decoder, names)
    spec = replace(spec, decoder=replace(spec.decoder, quantization=schemes or None))
    locate_parameters(spec.decoder, names, tensors)
    return CheckpointHead(spec, names, tensors, f"mtp of {fingerprint}", _copies(tensors, target, weight_map))


def stated_head(config: Mapping[str, Any], target: DecoderSpec, weight_map: WeightMap) -> HeadSpec:
    """The head that a config.json describes. Its weights are in the encodings that the config states."""
    spec, names = mtp_spec(target), head_map(weight_map, target.num_layers)
    schemes = parse_schemes(config, lambda: names.names_of(spec.decoder), names.base)
    return replace(spec, decoder=replace(spec.decoder, quantization=schemes or None))


def _check_tensors(tensors: TensorSource, names: WeightMap, num_layers: int) -> None:
    """Raise CallboardError if a checkpoint lacks a head, or has one with other parts."""
    stored = [name.removeprefix(names.base) for name in tensors.names()]
    if other := next((match[1] for match in map(_OTHER_PASS.fullmatch, stored) if match), None):
        raise CallboardError(f"draft is mtp, but the head of this checkpoint has mtp.{other}, which is not supported.")
    layer = names.names["attn_norm"].partition("{}")[0]
    own, wanted = f"{layer}{names.first_layer}.", _begin(names)
    if not any(name.startswith(wanted) for name in stored):
        raise CallboardError(f"draft is mtp, but this checkpoint lacks the head's tensors, {wanted}*; use another one.")
    if any(name.startswith(f"{layer}{names.first_layer + 1}.") for name in stored):
        raise CallboardError(
            f"draft is mtp, but the head of this checkpoint has more than one layer; only {own}* is supported."
        )


def _copies(tensors: TensorSource, target: DecoderSpec, weight_map: WeightMap) -> tuple[tuple[str, str], ...]:
    """The head's copies of the embedding and the output head, each with its original."""
    pairs = []
    for part, name in copies_of(weight_map, target.num_layers).items():
        original = weight_map.names["embed" if target.tied_head else part]
        copy, original = (stored_name(weight_map, each, tensors) for each in (name, original))
        # Another type cannot be compared.
        if copy in tensors and original in tensors and tensors.type_name(copy) == tensors.type_name(original):
            pairs.append((copy, original))
    return tuple(pairs)


def _stored_schemes(
    stated: Mapping[str, QuantizationScheme],
    target: Iterable[QuantizationScheme],
    tensors: TensorSource,
    decoder: DecoderSpec,
    names: WeightMap,
) -> dict[str, QuantizationScheme]:
    """The scheme of each quantized weight by its tensors. Configs often name a head's weights wrongly.

    The first one fits of: what the config states, dense, the target's schemes, fp8 in blocks."""
    others, found = (*dict.fromkeys(target), _FP8_BLOCKS), dict[str, QuantizationScheme]()
    for parameter, location in whole_locations(decoder, names).items():
        if not parameter.endswith(".weight") or chooses_experts(parameter):
            continue
        own = stated.get(parameter)
        for scheme in (own, None, *others):
            places = (location, location._replace(name=names.base + location.name))
            if any(_fits(scheme, tensors, place) for place in places):
                own = scheme
                break
        if own is not None:
            found[parameter] = own
    return found


def _fits(scheme: QuantizationScheme | None, tensors: TensorSource, location: Any) -> bool:
    if scheme is None and location.name in tensors and tensors.dtype(location.name) in _SCALES:
        stem = location.name.removesuffix(".weight")
        return not any(f"{stem}.{scale}" in tensors for scale in ("weight_scale_inv", "weight_scale"))
    return not fault_of(stored_format(scheme, location.shape), location, tensors)
