"""ForwardBatch: one forward pass's tokens, and the places for their keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from runtime.kernels.step.state_rows import StateRows


class AttentionMetadata(Protocol):
    """The keys that each token in a step attends to, in one attention backend's form. The backend's steps make
    it once, and its attention reads it in all layers."""

    num_tokens: int


class GroupRows(NamedTuple):
    """A step's tokens in one layer group's blocks."""

    kv_index: torch.Tensor  # [num_tokens] the place of each token's k and v: block * block_size + offset
    attention: AttentionMetadata


class Embeds(NamedTuple):
    """Embeddings in place of the token table's, such as an image's."""

    tokens: torch.Tensor  # [n] index in the step, int64
    embeddings: torch.Tensor  # [n, hidden], in the compute dtype; with deepstack, more for the first layers follow

    def add_after(self, layer: int, h: torch.Tensor) -> None:
        """Add the part for a layer, if there is one, to the hidden states after it (Qwen3-VL)."""
        start, stop = ((layer + i) * h.shape[1] for i in (1, 2))
        if stop <= self.embeddings.shape[1]:
            h[self.tokens] += self.embeddings[:, start:stop]


class Taps(NamedTuple):
    """Copies of the hidden states that enter some layers, for a head."""

    layers: Sequence[int]  # num_layers: what leaves the last one
    out: torch.Tensor  # [num_tokens, len(layers) * hidden]

    def take(self, layer: int, h: torch.Tensor) -> None:
        """Copy the states that enter a layer, if they are wanted."""
        for i, wanted in enumerate(self.layers):
            if wanted == layer:
                self.out[:, i * h.shape[1] : (i + 1) * h.shape[1]] = h


@dataclass(slots=True)
class ForwardBatch:
    """A step's tokens, row after row."""

    token_ids: torch.Tensor  # [num_tokens] int64, or int32 on a GPU, as all below
    positions: torch.Tensor  # [num_tokens] rotary positions: indices in the sequence, behind images less
    groups: Sequence[GroupRows]  # groups of the KV cache's layers
    adapters: torch.Tensor | None = None  # [num_tokens] each token's adapter index or 0; None if all are 0
    states: StateRows | None = None  # the step's rows, for a model with states
    embeds: Embeds | None = None
    # [3, num_tokens] rotary positions by frame, row and column, where the step reaches images; None if all are equal
    rope_positions: torch.Tensor | None = None
    taps: Taps | None = None  # None without a head that reads layers' inputs
    only_stores: bool = False  # the last layer stores the tokens' keys and values, and computes nothing else
