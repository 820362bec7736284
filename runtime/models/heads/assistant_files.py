"""The folder of a Gemma 4 assistant: its spec, its tensors' names, and what Callboard refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from runtime.base.model.attention_spec import AttentionSpec
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.head_spec import HeadSpec
from runtime.base.types import CallboardError
from runtime.models.config_checks import checked_config
from runtime.models.decoder import Decoder
from runtime.models.families import gemma4
from runtime.models.families.defaults import with_defaults
from runtime.models.heads.assistant import (
    CENTROID_ORDER,
    CENTROIDS,
    LAST_KEY_POSITION,
    POST,
    PRE,
    TABLE,
    AssistantHead,
)
from runtime.models.weights import read_from
from runtime.quant import parse_schemes
from runtime.quant.weight_format import TensorSource

_MODEL_TYPES = "gemma4_assistant", "gemma4_unified_assistant"
_ORDER = "masked_embedding.token_ordering"
_GEMMA = "Gemma4ForCausalLM"
# No layer has an embedding of its own, and none sees an image as a whole.
_FIXED = {"architectures": [_GEMMA], "vocab_size_per_layer_input": None, "use_bidirectional_attention": None}
_OF_UNIFIED = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True}  # fields that unified assistants lack
_SIZES = {"num_kv_heads": "heads of keys and values", "head_dim": "elements a head", "window": "tokens of a window"}
_WEIGHT_MAP = replace(
    gemma4.WEIGHT_MAP,
    names={
        **gemma4.WEIGHT_MAP.names,
        PRE.removesuffix(".weight"): "pre_projection",
        POST.removesuffix(".weight"): "post_projection",
        CENTROIDS.removesuffix(".weight"): "masked_embedding.centroids",
        TABLE: gemma4.WEIGHT_MAP.names["embed"],
    },
    base="model.",
    ignored=rf"{gemma4.WEIGHT_MAP.ignored}|lm_head\.weight|masked_embedding\.token_ordering",
)


@dataclass(frozen=True)
class AssistantFiles:
    """The head in a folder (HeadSource)."""

    spec: HeadSpec
    tensors: TensorSource
    fingerprint: str

    def load(
        self, target: Decoder, spec: HeadSpec, num_positions: int, updated: TensorSource | None = None
    ) -> AssistantHead:
        """Read the weights, after a check of all tensors. `spec` is this head's, or one rank's share."""
        ids = _ordered_ids(self.tensors, spec.decoder.whole.vocab_size) if spec.num_ids else None
        read = read_from(self.tensors, spec.decoder, _WEIGHT_MAP, target.numerics)
        return AssistantHead(spec, target, read, num_positions, ids)


def is_assistant(config: Mapping[str, Any]) -> bool:
    """True for the config.json of an assistant."""
    return config.get("model_type") in _MODEL_TYPES


def assistant_files(
    config: Mapping[str, Any], tensors: TensorSource, fingerprint: str, target: DecoderSpec
) -> AssistantFiles:
    """The head in a folder with this config.json and these tensors.

    Raises CallboardError, in one sentence, if the head does not fit the target."""
    spec = assistant_spec(config, target)
    schemes = parse_schemes(config, lambda: _WEIGHT_MAP.names_of(spec.decoder), _WEIGHT_MAP.base)
    return AssistantFiles(
        replace(spec, decoder=replace(spec.decoder, quantization=schemes or None)), tensors, fingerprint
    )


def assistant_spec(config: Mapping[str, Any], target: DecoderSpec) -> HeadSpec:
    """The spec of an assistant's config.json. Raises CallboardError, with both sizes, if it does not fit the target."""
    own = checked_config(with_defaults({**config, "text_config": _text(config)}, _GEMMA))
    hidden = config.get("backbone_hidden_size", 1536)
    for what, size, other in (
        ("vocabulary", own["vocab_size"], target.vocab_size), ("hidden size", hidden, target.hidden_size)
    ):  # fmt: skip
        if size != other:
            raise CallboardError(f"The head is for a {what} of {size}; the target's is {other}.")
    if own["num_kv_shared_layers"] != own["num_hidden_layers"] or not config.get("tie_word_embeddings", True):
        raise CallboardError(
            f"The head's num_kv_shared_layers is {own['num_kv_shared_layers']} and its tie_word_embeddings "
            f"{config.get('tie_word_embeddings', True)}; they must be {own['num_hidden_layers']} and true."
        )
    decoder = gemma4.decoder_spec(own, _sources(target))
    for mixer in decoder.attentions.values():
        _check_cached(mixer, target)
    size, num_ids = decoder.hidden_size, 0
    others: dict[str, tuple[int, ...]] = {PRE: (size, 2 * hidden), POST: (hidden, size)}
    if config.get("use_ordered_embeddings"):
        num_ids = _num_ids(config, decoder.vocab_size)
        others |= {CENTROIDS: (config.get("num_centroids", 2048), size), TABLE: (decoder.vocab_size, size)}
    flags = frozenset(flag for flag in (LAST_KEY_POSITION, CENTROID_ORDER) if config.get(flag))
    decoder = replace(decoder, lent=frozenset(("embed",) if num_ids else ()), others=tuple(others.items()))
    return HeadSpec("assistant", decoder, hidden, own_head=True, num_ids=num_ids, flags=flags)


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text_config, with what assistants have in common."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CallboardError(f"The head's text_config is {str(text)[:40]!r}; it must be an object.")
    shared = text.get("num_kv_shared_layers") or text.get("num_hidden_layers")
    return {**_OF_UNIFIED, **text, **_FIXED, "num_kv_shared_layers": shared}


def _sources(target: DecoderSpec) -> dict[str, int]:
    """Each kind's last layer in the target with its own keys and values."""
    found = {
        "sliding_attention" if mixer.window else "full_attention": layer
        for layer, mixer in target.attentions.items()
        if isinstance(mixer, AttentionSpec) and mixer.kv_source is None and mixer.v_norm
    }
    if len(found) < 2:
        raise CallboardError(
            "The head is an assistant of Gemma 4, but the target lacks layers with a window and layers without one."
        )
    return found


def _check_cached(mixer: Any, target: DecoderSpec) -> None:
    """Raise CallboardError unless a layer can read its source's keys and values."""
    source = target.layers[mixer.kv_source].mixer
    for field, words in _SIZES.items():
        own, other = getattr(mixer, field), getattr(source, field)
        if own != other:
            raise CallboardError(
                f"The head reads {own} {words} in the target's layer {mixer.kv_source}, which has {other}."
            )


def _num_ids(config: Mapping[str, Any], vocab_size: int) -> int:
    """The tokens with a logit in a head with centroids."""
    centroids, best = config.get("num_centroids", 2048), config.get("centroid_intermediate_top_k", 32)
    are_whole = all(type(n) is int for n in (centroids, best))
    if not are_whole or not 0 < best <= centroids or vocab_size % centroids:
        raise CallboardError(
            f"The head's num_centroids is {centroids!r} and its centroid_intermediate_top_k {best!r}; the first must "
            f"divide the vocabulary of {vocab_size}, and the second must lie between 1 and the first."
        )
    return int(best * (vocab_size // centroids))


def _ordered_ids(tensors: TensorSource, vocab_size: int) -> torch.Tensor:
    """[vocab_size] the token ids in the centroids' order."""
    if _ORDER not in tensors:
        raise CallboardError(f"The head lacks {_ORDER}, which its use_ordered_embeddings needs.")
    ids = tensors.tensor(_ORDER, torch.int64)
    if not torch.equal(ids.sort().values, torch.arange(vocab_size)):
        raise CallboardError(f"The head's {_ORDER} does not name each of {vocab_size} tokens once.")
    return ids
