"""Numerics: what a decoder's bits depend on, apart from the weights and the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True)
class Numerics:
    """How a decoder computes."""

    dtype: torch.dtype
    device: torch.device
    backend: Literal["torch", "triton", "llvm"]  # llvm: torch, with native products for quantized weights
    packed: bool  # true if linear layers are pre-packed for oneDNN
    deterministic: bool
    rank_invariant: bool = False  # implies deterministic
    activation_bits: int = 16  # activation bits in a CPU's products with quantized weights: 16 or 8

    @property
    def dtype_name(self) -> str:
        """The dtype without torch's prefix, as in configurations."""
        return str(self.dtype).removeprefix("torch.")
