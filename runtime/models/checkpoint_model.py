"""The model in a checkpoint's tensors: its config is completed by a look at them, and unused ones are named."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.sharding import Part
from runtime.models import CLASSIFIER, load_spec
from runtime.models.kv_scales import KV_SCALES
from runtime.models.weight_map import TOWERS, WeightMap
from runtime.quant.model_formats import weight_formats
from runtime.quant.weight_format import Location, TensorSource

logger = logging.getLogger(__name__)
_COMPARED_AT_ONCE = 1 << 24  # numbers
_MOST_NAMED = 4  # tensors in a message
# Tensors that hold no weights, or that another reader knows
_NO_WEIGHTS = re.compile(
    rf".*rotary_emb\.inv_freq|h\.\d+\.attn\.(masked_)?bias|{re.escape(CLASSIFIER)}|{KV_SCALES}|{TOWERS}"
)
_PART = re.compile(r"(?:model\.)?((?:layers|blk)\.\d+|\w+)")  # the model's part in a tensor's name


def checkpoint_model(config: Mapping[str, Any], source: TensorSource) -> tuple[DecoderSpec, WeightMap]:
    """Return a checkpoint's spec, and how it stores the spec. Raises CallboardError as `load_spec`.

    A separate head is read although the config calls it tied, as transformers does. A file may have the tied matrix
    only under the head's name."""
    names = source.names()
    spec, weight_map = load_spec(config, names)
    if not spec.tied_head:
        return spec, weight_map
    embed, head = (stored_name(weight_map, weight_map.names[part], source) for part in ("embed", "head"))
    if embed not in source and head in source:
        return spec, replace(weight_map, names={**weight_map.names, "embed": weight_map.names["head"]})
    stem = head.removesuffix("weight")
    own = {name for name in names if name.startswith(stem)} - {f"{stem}bias"}
    if not own or (own == {head} and embed in source and are_equal(source, embed, head)):
        return spec, weight_map
    logger.warning("%s differs from the embedding and is used, although the config has tie_word_embeddings.", head)
    return load_spec(config, names, tied=False)


def stored_name(weight_map: WeightMap, name: str, source: TensorSource) -> str:
    """A tensor's name with `WeightMap.base`, if the checkpoint has it so."""
    stem, longer = name.removesuffix("weight"), weight_map.base + name
    return longer if longer in source or any(n.startswith(weight_map.base + stem) for n in source.names()) else name


def are_equal(source: TensorSource, first: str, second: str) -> bool:
    """Compare two matrices, some rows at a time."""
    if (shape := source.shape(first)) != source.shape(second):
        return False
    dtype = source.dtype(first) if source.dtype(first) == source.dtype(second) else torch.float32
    step, cpu = max(1, _COMPARED_AT_ONCE // shape[-1]), torch.device("cpu")
    parts = (Part(0, start, min(start + step, shape[0])) for start in range(0, shape[0], step))
    return all(torch.equal(*(source.tensor(name, dtype, cpu, part) for name in (first, second))) for part in parts)


class UnusedTensors(NamedTuple):
    """Tensors of a checkpoint that its model does not read."""

    left_out: list[str]  # parts without a use: sound, layers that draft tokens
    unknown: list[str]

    @property
    def known_line(self) -> str:
        """Names the parts that are left out; empty without any."""
        parts = Counter(match[1] for name in self.left_out if (match := _PART.match(name)))
        return ", ".join(f"{count} of {part}" for part, count in parts.most_common(_MOST_NAMED))

    @property
    def unknown_line(self) -> str:
        """Names some unknown tensors; empty without any."""
        more = len(self.unknown) - _MOST_NAMED
        return ", ".join(self.unknown[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")

    def log(self) -> None:
        """Report both kinds, in a line each."""
        if self.left_out:
            logger.info("tensors that texts do not need are left out of the decoder: %s", self.known_line)
        if self.unknown:
            text = "%d tensors of the checkpoint have no place in the model that its config describes, and are not used"
            logger.warning(f"{text}: %s", len(self.unknown), self.unknown_line)


def unused_tensors(
    spec: DecoderSpec, weight_map: WeightMap, source: TensorSource, locations: Mapping[str, Location]
) -> UnusedTensors:
    """Return the tensors that no location has. Copies of a tied head and zero biases change nothing."""
    format_of, cpu = weight_formats(spec.whole, None), torch.device("cpu")
    used = {name for parameter, location in locations.items() for name in format_of(parameter).stored(location)}
    found = UnusedTensors([], [])
    for name in sorted(set(source.names()) - used):
        short = name.removeprefix(weight_map.base)
        if _NO_WEIGHTS.fullmatch(short) or (spec.tied_head and short == weight_map.names["head"]):
            continue
        if weight_map.is_ignored(name):
            found.left_out.append(name)
        elif not name.endswith(".bias") or source.tensor(name, torch.float32, cpu).any():
            found.unknown.append(name)
    return found
