"""Small decoders for tests, by the names of fields wherever a spec has them."""

from dataclasses import fields, replace
from typing import Any

from runtime.base.model.attention_spec import AttentionSpec
from runtime.base.model.decoder_spec import DecoderSpec, FfnSpec, LayerSpec
from runtime.base.model.latent_spec import LatentSpec

_NAMES = {kind: {field.name for field in fields(kind)} for kind in (DecoderSpec, LayerSpec, AttentionSpec, LatentSpec)}
_OF_FFN = {"ffn_size": "size"} | {field.name: field.name for field in fields(FfnSpec)}


def dense_spec(num_layers: int, hidden_size: int, vocab_size: int, max_positions: int, **given: Any) -> DecoderSpec:
    """A decoder with layers of attention, and these fields."""
    layer = LayerSpec(AttentionSpec(1, 1, 1), FfnSpec(0))
    spec = DecoderSpec((layer,) * num_layers, hidden_size, vocab_size, max_positions, given.pop("norm_eps"))
    return changed(spec, **given)


def changed(spec: DecoderSpec, num_layers: int = 0, **given: Any) -> DecoderSpec:
    """The spec with other fields. Layers, mixers and feed-forward parts get the fields that they have.

    A tuple has the values of layers, which repeat, but for `norms`; a `mixer` of None changes nothing. Another number
    of layers repeats them, too."""
    unknown = given.keys() - set().union(*_NAMES.values()) - _OF_FFN.keys()
    assert not unknown, f"no part of a spec has {unknown}"
    layers = [spec.layers[i % len(spec.layers)] for i in range(num_layers or len(spec.layers))]
    ends = {name: given.pop(name) for name in _NAMES[DecoderSpec] & given.keys()}
    return replace(spec, layers=tuple(_layer(layer, i, given) for i, layer in enumerate(layers)), **ends)


def _layer(layer: LayerSpec, index: int, given: dict[str, Any]) -> LayerSpec:
    own = {
        name: value[index % len(value)] if isinstance(value, tuple) and name != "norms" else value
        for name, value in given.items()
    }
    if own.get("mixer") is None:
        own.pop("mixer", None)
    layer = replace(layer, **{name: own.pop(name) for name in _NAMES[LayerSpec] & own.keys()})
    ffn = replace(layer.ffn, **{_OF_FFN[name]: own.pop(name) for name in _OF_FFN.keys() & own.keys()})
    of_mixer = _NAMES.get(type(layer.mixer), set()) & own.keys()
    return replace(layer, ffn=ffn, mixer=replace(layer.mixer, **{name: own[name] for name in of_mixer}))


def field_of(spec: DecoderSpec, name: str) -> Any:
    """A field's value: the spec's own, or the one of its layers; a tuple of all that have it if they differ."""
    if name in _NAMES[DecoderSpec] or name in ("experts", "states"):
        return getattr(spec, name)
    name = _OF_FFN.get(name, name)
    parts = [[part for part in (layer, layer.mixer, layer.ffn) if hasattr(part, name)] for layer in spec.layers]
    values = tuple(getattr(own[0], name) for own in parts if own)
    return values[0] if len(set(values)) == 1 else values


TINY = dense_spec(
    num_layers=2, hidden_size=48, num_heads=6, num_kv_heads=2, head_dim=16, ffn_size=80, vocab_size=131,
    max_positions=256, norm_eps=1e-5,
)  # fmt: skip
