"""DecoderSpec: a decoder-only transformer as data. A family file turns a checkpoint's config into one of these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (arXiv 2104.09864), half-split layout, and how it is stretched to longer contexts."""

    theta: float = 10000.0
    type: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0  # context is stretched by this much; linear and llama3
    low_freq_factor: float = 1.0  # llama3: wavelengths above original_positions / this are stretched fully
    high_freq_factor: float = 4.0  # llama3: wavelengths below original_positions / this are kept
    original_positions: int = 8192  # llama3: the context before stretching


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Shape and kind of every part of one decoder."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: RopeSpec = RopeSpec()
    activation: Literal["silu", "gelu_tanh"] = "silu"  # of the gate
    tied_head: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim of each q and k head, before RoPE
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False

    def linears(self) -> dict[str, tuple[dict[str, tuple[int, int]], bool]]:
        """A layer's linear maps: fused name -> ({part: (out, in) shape}, has a bias), parts in row order."""
        hidden, ffn = self.hidden_size, self.ffn_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "qkv": ({"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden)}, self.qkv_bias),
            "out": ({"out": (hidden, q)}, self.out_bias),
            "gate_up": ({"gate": (ffn, hidden), "up": (ffn, hidden)}, self.ffn_bias),
            "down": ({"down": (hidden, ffn)}, self.ffn_bias),
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter by its unfused name, `layers.3.q.weight` say, and its shape."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, hidden), "final_norm": (hidden,)}
        if not self.tied_head:
            shapes["head"] = (self.vocab_size, hidden)
        for i in range(self.num_layers):
            shapes[f"layers.{i}.attn_norm"] = shapes[f"layers.{i}.ffn_norm"] = (hidden,)
            if self.qk_norm:
                shapes[f"layers.{i}.q_norm"] = shapes[f"layers.{i}.k_norm"] = (self.head_dim,)
            for parts, has_bias in self.linears().values():
                for part, shape in parts.items():
                    shapes[f"layers.{i}.{part}.weight"] = shape
                    if has_bias:
                        shapes[f"layers.{i}.{part}.bias"] = shape[:1]
        return shapes
