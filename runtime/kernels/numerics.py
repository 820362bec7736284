"""Numerics: everything that a decoder's bits depend on beside the weights and the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class Numerics:
    """How a decoder computes."""

    dtype: torch.dtype
    device: torch.device
    backend: Literal["torch", "triton"]
    packed: bool  # linear layers pre-packed for oneDNN
    deterministic: bool
    rank_invariant: bool = False  # deterministic, too

    @property
    def dtype_name(self) -> str:
        """The dtype without Torch's prefix, as configurations have it."""
        return str(self.dtype).removeprefix("torch.")
