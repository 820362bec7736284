"""TowerSpec: an image encoder as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Positions = Literal["learned", "buckets", "resized", "tables", "bilinear", "none"]
Rope2d = Literal["none", "interleaved", "halves", "axes"]  # Pixtral, Qwen, Gemma 4
Projector = Literal["shuffle", "merge_rows", "merge_blocks", "pool_norm", "pool_scale", "unshuffle"]


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """A vision transformer, and the projector of its outputs into the decoder's hidden states.

    Sizes count elements, unless their comments name another unit. `models/towers/` has the tensors' names."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    head_dim: int
    out_size: int  # the decoder's hidden size
    patch_size: int  # pixels a side
    merge: int  # patches a side that become one embedding
    projector: Projector
    activation: str = "gelu_tanh"
    gated: bool = False  # the feed-forward part is gated
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6
    positions: Positions = "learned"
    num_positions: int = 0  # learned positions, or a side of their grid as its square
    rope: Rope2d = "none"
    rope_theta: float = 10_000.0
    projector_size: int = 0  # width between the projector's two maps; 0 if it has one
    deepstack: tuple[int, ...] = ()  # layers with outputs for the decoder's first layers
