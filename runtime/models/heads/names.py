"""The names that checkpoints have for a head of their own (MTP, NextN)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from runtime.models.weight_map import WeightMap

_MODEL = "model."


class MtpNames(NamedTuple):
    """How checkpoints name a head's parameters. {} is the number of the target's layers."""

    own: Mapping[str, str]  # parameters besides the layer's
    layer: str = ""  # begins the layer's names; empty if they follow the target's
    copies: Mapping[str, str] = {}  # the target's parameters that the head may have again


QWEN = MtpNames(
    {
        "fc": "mtp.fc",
        "token_norm": "mtp.pre_fc_norm_embedding.weight",
        "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
        "final_norm": "mtp.norm.weight",
    },
    "mtp.layers.{}.",
)
NEXTN = MtpNames(
    {
        "fc": "layers.{}.eh_proj",
        "token_norm": "layers.{}.enorm.weight",
        "hidden_norm": "layers.{}.hnorm.weight",
        "final_norm": "layers.{}.shared_head.norm.weight",
    },
    copies={"embed": "layers.{}.embed_tokens.weight", "head": "layers.{}.shared_head.head.weight"},
)
# GGUF's names behind blk.N.nextn. -> parameters, embed and head are copies
GGUF_PARTS = {
    "eh_proj": "fc", "enorm": "token_norm", "hnorm": "hidden_norm", "shared_head_norm": "final_norm",
    "embed_tokens": "embed", "shared_head_head": "head",
}  # fmt: skip


def names_of(weight_map: WeightMap) -> MtpNames:
    """The names of the family with this map. Qwen's maps leave `mtp.*` out."""
    return QWEN if weight_map.is_ignored("mtp.fc") else NEXTN


def copies_of(weight_map: WeightMap, num_layers: int) -> dict[str, str]:
    """The target's parameters -> the names of their copies in its head."""
    prefix = _prefix(weight_map)
    return {part: prefix + name.format(num_layers) for part, name in names_of(weight_map).copies.items()}


def head_map(weight_map: WeightMap, num_layers: int) -> WeightMap:
    """A head's names, from its target's names and number of layers."""
    kind, prefix = names_of(weight_map), _prefix(weight_map)
    names = {part: name for part, name in weight_map.names.items() if name.startswith(f"{prefix}layers.{{}}.")}
    if kind.layer:
        names = {part: kind.layer + name.removeprefix(f"{prefix}layers.{{}}.") for part, name in names.items()}
        return replace(weight_map, names={**names, **kind.own})
    own = {part: prefix + name.format(num_layers) for part, name in kind.own.items()}
    return replace(weight_map, names={**names, **own}, first_layer=num_layers)


def _prefix(weight_map: WeightMap) -> str:
    return _MODEL if weight_map.names["attn_norm"].startswith(_MODEL) else ""
