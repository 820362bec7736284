"""Finds a head in a checkpoint: its spec, its tensors' names, and what Callboard refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.head_spec import HeadSpec
from runtime.base.types import CallboardError
from runtime.models.decoder import Decoder
from runtime.models.heads.build import build_head
from runtime.models.heads.head import DraftHead
from runtime.models.weight_map import WeightMap
from runtime.models.weights import locate_parameters, reader
from runtime.quant.model_formats import weight_formats
from runtime.quant.weight_format import TensorSource

_LAYER = re.compile(r"(?:model\.)?layers\.\{\}\.")  # begins a decoder's name for a layer's parameter


class MtpNames(NamedTuple):
    """How checkpoints name a head's parameters. {} is the number of the target's layers."""

    layer: str  # prefix of the layer's names
    own: Mapping[str, str]  # parameters besides the layer's
    copies: Mapping[str, str]  # the target's parameters that the head may have again


_QWEN = MtpNames(
    "mtp.layers.0.",
    {
        "fc": "mtp.fc",
        "token_norm": "mtp.pre_fc_norm_embedding.weight",
        "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
        "final_norm": "mtp.norm.weight",
    },
    {},
)
_NEXTN = MtpNames(
    "layers.{}.",
    {
        "fc": "layers.{}.eh_proj",
        "token_norm": "layers.{}.enorm.weight",
        "hidden_norm": "layers.{}.hnorm.weight",
        "final_norm": "layers.{}.shared_head.norm.weight",
    },
    {"embed": "layers.{}.embed_tokens.weight", "head": "layers.{}.shared_head.head.weight"},
)
# Tensors of forward passes that MtpHead lacks
_OTHER_PASSES = re.compile(r"(?:.*\.)?mtp\.(?:fc_embedding|fc_hidden)\..*")
_OTHER_FLAGS = ("mtp_hidden_states_first", "chain_hidden_post_norm", "mtp_use_dedicated_embeddings")
_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")


@dataclass(frozen=True)
class CheckpointHead:
    """A head in the tensors of a checkpoint (HeadSource)."""

    spec: HeadSpec
    weight_map: WeightMap
    tensors: TensorSource
    fingerprint: str

    def load(self, target: Decoder, spec: HeadSpec, num_positions: int) -> DraftHead:
        """Read the weights, after a check of all tensors."""
        locations = locate_parameters(spec.decoder, self.weight_map, self.tensors)
        format_of = weight_formats(spec.decoder, target.numerics)
        read = reader(self.tensors, locations, format_of, self.weight_map, target.numerics)
        return build_head(spec, target, read, num_positions)


def checkpoint_head(
    config: Mapping[str, Any], tensors: TensorSource, fingerprint: str, target: DecoderSpec, weight_map: WeightMap
) -> CheckpointHead:
    """The head that a target's checkpoint brings. Raises CallboardError, with a name, if it has none that runs."""
    raise CallboardError("draft is mtp, which this build cannot load yet.")
