"""RopeSpec: rotary positions as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (arXiv 2104.09864), half-split layout, with its stretching to longer contexts.

    models/rope.py reads it from a config; `rope_table` of kernels/attention/rope.py computes each type."""

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0  # context is stretched by this much; linear, dynamic, llama3 and yarn
    low_freq_factor: float = 1.0  # llama3: wavelengths above original_positions / this are stretched fully
    high_freq_factor: float = 4.0  # llama3: wavelengths below original_positions / this are kept
    original_positions: int = 8192  # the context before stretching; all but default and linear, and for query_beta
    partial: float = 1.0  # share of head_dim that rotates: its first dimensions; with `proportional`, of each half
    interleaved: bool = False  # the checkpoint pairs dimension 2 i with 2 i + 1, not i with i + half
    attention_factor: float = 1.0  # factor for cos and sin; yarn and longrope
    beta_fast: float = 32.0  # yarn: dimensions with more turns than this in the original context are kept
    beta_slow: float = 1.0  # yarn: dimensions with fewer turns than this are stretched fully
    query_beta: float = 0.0  # q is multiplied by 1 + this * ln(1 + position // original_positions)
    truncate: bool = True  # yarn: the edges between are whole dimensions
    short_factor: tuple[float, ...] = ()  # longrope: divisors of the frequencies, up to the original context
    long_factor: tuple[float, ...] = ()  # longrope: divisors of the frequencies above the original context
    sections: tuple[int, ...] = ()  # M-RoPE: frequencies that turn by frame, row and column; () for one position
    mixed_sections: bool = False  # sections take turns; else they follow one another

    @property
    def reorders_heads(self) -> bool:
        """True if loading permutes the rows of q and k (runtime.models.linear_maps.rope_permutation)."""
        return self.type != "proportional" and self.partial > 0.0 and (self.partial < 1.0 or self.interleaved)
