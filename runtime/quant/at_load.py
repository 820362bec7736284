"""Quantization that a user asks for: plain weights become codes as they are read, or codes become plain numbers.

Torch is not imported here: what a configuration cannot ask of a model is told before anything is loaded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from runtime.quant.scheme import QuantizationScheme
from runtime.spec.config import EngineConfig
from runtime.spec.decoder_spec import DecoderSpec
from runtime.spec.sharding import Shard, leaves_of
from runtime.spec.types import CallboardError

PLAIN = "plain"  # the layout of weights that are encoded as they are read
GROUPS = {"fp8": 0, "int8": 0, "int4": 128, "nf4": 64}  # of each form, the columns that share a scale; 0: all
_OF_HEAD = ("fp8", "int8")  # forms that a head can have
_WITH_HEAD = ("int8", "int4")  # forms of maps beside which a CPU would read a plain head for much of a step
_WHOLE, _SMALL = 128, 32  # columns that groups of any size divide, and the size where they do not


def requested_encodings(config: EngineConfig, is_draft: bool = False) -> dict[str, str]:
    """The forms that `config` sets for linear maps and for the head, by the name of the field that a user has set."""
    of_maps = "draft_quantization" if is_draft else "quantization"  # `draft_config` gives a draft its own
    return {of_maps: config.quantization, "head_quantization": config.head_quantization}


def quantized_at_load(spec: DecoderSpec, config: EngineConfig, device: str = "", is_draft: bool = False) -> DecoderSpec:
    """The spec with the schemes that `config` wants for its linear maps and its head on a type of device.

    The embedding, routers, norms and biases stay plain; a tied head does with the embedding, unless head_quantization
    names a form. On a CPU int8 and int4 maps come with a head in int8, if it is plain in the checkpoint. Raises
    CallboardError if the checkpoint has codes of another form already."""
    schemes: dict[str, QuantizationScheme] = dict(spec.quantization or {})
    maps = [name for name in spec.shapes() if name.endswith(".weight") and ".router." not in name]
    fields = requested_encodings(config, is_draft)
    of_maps, of_head = fields.values()
    if of_maps == "none" and of_head == "auto":
        of_head = "none"
    elif device == "cpu" and of_maps in _WITH_HEAD and of_head == "auto" and "head" not in schemes:
        of_head = "int8"
    for field, form, names in zip(fields, (of_maps, of_head), (maps, ["head"]), strict=True):
        stored = {name: schemes[name] for name in names if name in schemes}
        if form == "none":
            schemes |= {name: replace(scheme, dequantized=True) for name, scheme in stored.items()}
        elif form != "auto" and stored:
            _check_stored(field, form, stored)
        elif form != "auto":
            of_rank = spec.of_rank(Shard(0, config.tensor_parallel_size))
            schemes |= _schemes(of_rank, names, form, config.rank_invariant)
    return replace(spec, quantization=schemes or None)


def _check_stored(field: str, form: str, stored: Mapping[str, QuantizationScheme]) -> None:
    """Raises CallboardError unless `form` is that of most weights in the checkpoint."""
    (most, _), *others = Counter(scheme.encoding for scheme in stored.values()).most_common()
    if most != form:
        found = ", ".join([most, *(other for other, _ in others)])
        keep = most if most in (_OF_HEAD if field == "head_quantization" else GROUPS) else "auto"
        raise CallboardError(
            f"{field} is {form}, but the checkpoint's weights are {found} already; use {keep} to keep them, none to "
            "dequantize them, or a checkpoint with weights in bfloat16."
        )


def _schemes(spec: DecoderSpec, names: list[str], form: str, in_leaves: bool) -> dict[str, QuantizationScheme]:
    """Schemes with groups that divide the columns of a rank, or of its leaves; those of all experts of a layer are
    alike."""
    shapes, schemes = {"head": (spec.vocab_size, spec.hidden_size)} | spec.shapes(), dict[str, QuantizationScheme]()
    columns = defaultdict[str, int](int)
    for name in names:
        leaves = leaves_of(spec, name) if in_leaves else []
        own = [leaf.stop - leaf.start for leaf in leaves if leaf.dim == 1] or [shapes[name][1]]
        columns[_together(name)] = gcd(columns[_together(name)], *own)
    for name in names:
        is_whole = columns[_together(name)] % _WHOLE == 0
        schemes[name] = QuantizationScheme(
            PLAIN, form, group_size=GROUPS[form] if is_whole else min(GROUPS[form], _SMALL)
        )
    return schemes


def _together(name: str) -> str:
    """The name of a weight, or of the layer whose experts it is one of."""
    layer, experts, _ = name.partition(".experts.")
    return layer if experts else name
