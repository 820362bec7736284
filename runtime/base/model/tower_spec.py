"""TowerSpec: an image encoder as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

# How learned positions reach a grid of patches; `models/towers/positions.py` has a function for each
Positions = Literal["none", "learned", "buckets", "resized", "bilinear", "bicubic", "tables"]
Rope2d = Literal["none", "interleaved", "halves", "axes"]  # layouts of Pixtral, Qwen and Gemma 4


class Step(NamedTuple):
    """A step of a projector, by its name in `models/towers/projectors.py`."""

    op: str
    name: str = ""  # parameter; empty without one
    shape: tuple[int, ...] = ()  # shape of its weight
    bias: bool = False
    eps: float = 1e-6  # norm only

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the name and shape of each parameter. A gated step has three maps, and the first one's shape."""
        if self.op == "gated":
            parts = {"gate": self.shape, "up": self.shape, "down": self.shape[::-1]}
            return {f"{self.name}.{part}.weight": shape for part, shape in parts.items()}
        return _linear(self.name, self.shape, self.bias) if self.name else {}


@dataclass(frozen=True, slots=True)
class TowerSpec:
    """A vision transformer, and the projector of its outputs into the decoder's hidden states.

    Sizes count elements, unless their comments name another unit."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    head_dim: int
    out_size: int  # the decoder's hidden size
    patch_size: int  # pixels a side
    merge: int  # patches a side that become one embedding
    projector: tuple[Step, ...]
    names: Mapping[str, str] = field(compare=False, repr=False)  # parameter -> tensor; {} is the layer
    activation: str = "gelu_tanh"
    gated: bool = False  # the feed-forward part is gated
    joint_qkv: bool = False  # q, k and v are one map
    qkv_bias: bool = True
    bias: bool = True  # other maps of a layer have one
    patch_bias: bool = True
    norm: Literal["norm", "rms"] = "norm"
    norm_eps: float = 1e-6
    patch_norm: bool = False  # a norm precedes the positions
    post_norms: bool = False  # after attention, and after the feed-forward part
    layer_scales: bool = False  # what a layer adds has a factor
    qk_norm: bool = False  # each head's q and k have an RMSNorm, and v one without weights
    scale: float = 0.0  # factor of attention scores; 0 for head_dim ** -0.5
    limits: bool = False  # maps may limit their inputs and outputs
    positions: Positions = "none"
    position_shape: tuple[int, ...] = ()
    class_token: bool = False  # precedes the patches
    rope: Rope2d = "none"
    rope_theta: float = 10_000.0
    deepstack: tuple[int, ...] = ()  # layers with outputs for the decoder's first layers
    deepstack_projector: tuple[Step, ...] = ()  # {} in a name is the index in `deepstack`
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # mean of pixels from 0 to 1
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    doubles_pixels: bool = False  # pixels then become 2 x - 1 (Gemma 4)

    @property
    def width(self) -> int:
        """Elements of an embedding: a hidden state, and one for each layer in `deepstack`."""
        return self.out_size * (1 + len(self.deepstack))

    def num_embeddings(self, height: int, width: int) -> int:
        """Return the number of embeddings for a picture, or a tile, with these pixels."""
        side = self.patch_size * self.merge
        return (height // side) * (width // side)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every parameter's name and shape. A map's weight is (out, in)."""
        hidden, inner = self.hidden_size, self.num_heads * self.head_dim
        shapes = _linear("patch", (hidden, 3 * self.patch_size**2), self.patch_bias)
        if self.position_shape:
            shapes["positions"] = self.position_shape
        if self.class_token:
            shapes["class_token"] = (hidden,)
        if self.patch_norm:
            shapes |= self._norm("patch_norm")
        layer = self._norm("norm1") | self._norm("norm2")
        for part in ("qkv",) if self.joint_qkv else ("q", "k", "v"):
            layer |= _linear(part, (len(part) * inner, hidden), self.qkv_bias)
        layer |= _linear("out", (hidden, inner), self.bias) | _linear("down", (hidden, self.ffn_size), self.bias)
        for part in ("gate", "up") if self.gated else ("up",):
            layer |= _linear(part, (self.ffn_size, hidden), self.bias)
        if self.post_norms:
            layer |= self._norm("post_norm1") | self._norm("post_norm2")
        if self.layer_scales:
            layer |= {"scale1": (hidden,), "scale2": (hidden,)}
        if self.qk_norm:
            layer |= {"q_norm.weight": (self.head_dim,), "k_norm.weight": (self.head_dim,)}
        for i in range(self.num_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        steps = [*self.projector]
        for i in range(len(self.deepstack)):
            steps += [step._replace(name=step.name.format(i)) for step in self.deepstack_projector]
        for step in steps:
            shapes |= step.shapes()
        return shapes

    def _norm(self, name: str) -> dict[str, tuple[int, ...]]:
        return _linear(name, (self.hidden_size,), self.norm == "norm")

    @property
    def num_weights(self) -> int:
        """Return the number of elements in all parameters."""
        return sum(math.prod(shape) for shape in self.shapes().values())


def _linear(name: str, shape: tuple[int, ...], bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})
