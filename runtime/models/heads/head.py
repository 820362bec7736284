"""DraftHead: a head with its weights. Runners call it after the target has sampled.

- extend: the target's rows, shifted by one. A position takes its token, and the feature one position earlier.
- single: one more token a row. It takes the draft token before, and `recycled` in place of a feature.

A head without a cache has only single passes. The first one takes the last sample and the feature before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from runtime.base.model.head_spec import HeadSpec
from runtime.models.decoder import Decoder
from runtime.models.forward_batch import ForwardBatch
from runtime.models.mixers.mixer import LayerCache


class DraftHead(ABC):
    """The forward pass of a head. Embedding and output head may be its target's, which weight updates replace."""

    def __init__(self, spec: HeadSpec, target: Decoder) -> None:
        self.spec, self.target = spec, target

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
