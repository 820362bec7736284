"""DraftHead: a head with its weights. Runners call it after the target has sampled.

- extend: the target's rows, shifted by one. A position takes its token, and the feature one position earlier.
- single: one more token a row. It takes the draft token before, and `recycled` in place of a feature.

A head without a cache has only single passes. The first one takes the last sample and the feature before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from runtime.base.model.head_spec import HeadSpec
from runtime.base.model.sharding import Part
from runtime.kernels.linear.fused_linear import FusedLinear
from runtime.kernels.linear.linear_torch import Linear
from runtime.models.decoder import Decoder
from runtime.models.forward_batch import ForwardBatch
from runtime.models.heads.quantized_head import copy_format
from runtime.models.linear_maps import LinearMaps
from runtime.models.mixers.mixer import LayerCache
from runtime.quant.held_weight import HeldWeight
from runtime.quant.model_formats import weight_formats


class DraftHead(ABC):
    """The forward pass of a head. Embedding and output head may be its target's, which weight updates replace."""

    def __init__(self, spec: HeadSpec, target: Decoder) -> None:
        self.spec, self.target = spec, target
        self.output_copy = self._copied()  # the target's output head; None if that makes the logits

    def _copied(self) -> Linear | None:
        target = self.target
        if (own := copy_format(self.spec.decoder, target.numerics)) is None:
            return None
        formats = weight_formats(target.spec, target.numerics)

        def read(parameter: str, part: Part | None = None, /) -> HeldWeight:
            assert isinstance(target.head, FusedLinear), "only a GPU's layers keep their rows"
            return HeldWeight((parameter,), own, own.encode(target.head.weight))

        both = {"head": own, "embed": formats("embed")}
        return LinearMaps(target.spec, target.kernels, both.__getitem__, read).head(target.embed)

    def follow_output(self, take: Callable[[Linear, Linear], Linear]) -> None:
        """Copy the target's output head again after an update. `take(old, new)` returns the object that serves it."""
        if self.output_copy is not None and (copied := self._copied()) is not None:
            self.output_copy = take(self.output_copy, copied)

    @property
    def hidden_size(self) -> int:
        """Elements of `combined` and `recycled`."""
        return self.spec.decoder.hidden_size

    def combined(self, features: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] from [n, feature_width]: what `forward` takes in the first pass after the target's."""
        return features

    @abstractmethod
    def forward(self, batch: ForwardBatch, hidden: torch.Tensor, caches: Sequence[LayerCache]) -> torch.Tensor:
        """[n, its decoder's hidden size] from the batch's tokens and `hidden` [n, hidden_size] of the positions before.

        Writes the tokens' keys and values into `caches`, one for each layer of the head. They come from the last
        layer's input alone. So a pass with `batch.only_stores` ends there, and its result only shows NaNs. A head
        without a cache gets the positions of the last visible keys."""

    @abstractmethod
    def recycled(self, x: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size]: what the next single pass takes as `hidden`, from `forward`'s result."""

    @abstractmethod
    def logits(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[n, own vocabulary of the rank] float32 over the target's token ids, from `forward`'s result.

        Ids outside of a draft vocabulary have -inf. Writes into `out` if given."""
