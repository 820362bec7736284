"""ForwardBatch: the tokens of one forward pass, and where their keys and values are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class AttentionMetadata(Protocol):
    """Which keys each token of a step attends to, in the form of one attention backend: the backend's own steps make
    it, its attention reads it, and what lies between passes it on. Made once a step, it serves all layers."""

    num_tokens: int


@dataclass(slots=True)
class ForwardBatch:
    """A step's tokens, row after row."""

    token_ids: torch.Tensor  # [num_tokens] int64, or int32 on a GPU, as all below
    positions: torch.Tensor  # [num_tokens]
    kv_index: torch.Tensor  # [num_tokens] where each token's k and v go: block * block_size + offset
    attention: AttentionMetadata
    adapters: torch.Tensor | None = (
        None  # [num_tokens] the index of each token's adapter, 0 for none; None: no row has one
    )
