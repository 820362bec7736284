"""LayerSpec: one layer as data. A decoder is a list of layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from runtime.base.model.attention_spec import AttentionSpec
from runtime.base.model.experts_spec import ExpertsSpec, of_router
from runtime.base.model.latent_spec import LatentSpec
from runtime.base.model.mixer_spec import DeltaRuleSpec, Linears, SchemeOf, Shapes, ShortConvSpec
from runtime.base.shard import Shard
from runtime.base.types import CallboardError

ACTIVATION_LIMIT = 7.0  # swiglu_clamped: the largest gate, and the largest magnitude of up
PRE_NORMS = ("attn_norm", "ffn_norm")  # norms before the mixer and the feed-forward layer
POST_NORMS = ("post_attn_norm", "post_ffn_norm")  # norms after each, before the residual
_BESIDE_NORMS = ("experts_norm", "post_dense_norm", "post_experts_norm")

MixerSpec = AttentionSpec | LatentSpec | DeltaRuleSpec | ShortConvSpec


@dataclass(frozen=True, slots=True)
class FfnSpec:
    """A feed-forward layer, or a mixture with experts of this shape."""

    size: int  # intermediate values; one expert's in a mixture
    activation: Literal["silu", "gelu_tanh", "swiglu_clamped"] = "silu"  # the gate's
    gated: bool = True  # `up` alone is activated if false
    ffn_bias: bool = False
    fused_gate_up: bool = False  # the checkpoint has gate and up as one tensor
    experts: ExpertsSpec | None = None
    beside: int = 0  # the size of a feed-forward layer that runs next to experts, with its own norms

    def __post_init__(self) -> None:
        if self.ffn_bias and self.experts is not None and self.experts.shared > 1:
            raise CallboardError("The model's shared experts have biases; only one shared expert may have them.")

    def is_divided_by(self, size: int, unit: int) -> bool:
        """Return True if that many ranks can divide the intermediate values; `unit` as for `Shard.inner`."""
        has_units = unit > 1 and self.size // unit >= size
        return (has_units or self.size % size == 0) and self.beside % size == 0

    def of_rank(self, shard: Shard, unit: int) -> FfnSpec:
        """Return the share of one rank."""
        return replace(self, size=len(shard.inner(self.size, unit)), beside=self.beside // shard.size)

    def linears(self, hidden: int) -> Linears:
        """Return the maps. In a mixture, gate_up and down are the maps of each expert."""
        gate_up: Shapes = {"gate": (self.size, hidden), "up": (self.size, hidden)}
        if self.fused_gate_up:
            gate_up = {"gate_up": (2 * self.size, hidden)}
        linears: Linears = {
            "gate_up": (gate_up if self.gated else {"up": (self.size, hidden)}, self.ffn_bias),
            "down": ({"down": (hidden, self.size)}, self.ffn_bias),
        }
        if self.beside:
            linears["dense_gate_up"] = {"dense_gate": (self.beside, hidden), "dense_up": (self.beside, hidden)}, False
            linears["dense_down"] = {"dense_down": (hidden, self.beside)}, False
        return linears


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """A mixer, then a feed-forward layer. Both add to the hidden states."""

    mixer: MixerSpec
    ffn: FfnSpec
    norms: tuple[str, ...] = PRE_NORMS
    embed_size: int = 0  # the width of the layer's own token embedding (Gemma 4); 0 for none
    has_factor: bool = False  # the hidden states after the layer are multiplied by a factor

    def is_divided_by(self, size: int, unit: int) -> bool:
        """Return True if a group of that many ranks can divide the layer."""
        return self.mixer.is_divided_by(size) and self.ffn.is_divided_by(size, unit)

    def of_rank(self, shard: Shard, unit: int) -> LayerSpec:
        """Return the share of one rank."""
        return replace(self, mixer=self.mixer.of_rank(shard.size), ffn=self.ffn.of_rank(shard, unit))

    def linears(self, hidden: int, scheme_of: SchemeOf) -> Linears:
        """Return the linear maps: fused name -> ({part: (out, in) shape}, has a bias), parts in row order."""
        linears = self.mixer.linears(hidden, scheme_of) | self.ffn.linears(hidden)
        if width := self.embed_size:
            linears["layer_gate"] = {"layer_gate": (width, hidden)}, False
            linears["layer_out"] = {"layer_out": (hidden, width)}, False
        return linears

    def shapes(self, hidden: int, has_norm_bias: bool, linears: Linears) -> Shapes:
        """Return the shape of every parameter by its name within the layer; `linears` are its own."""
        norms = self.norms + _BESIDE_NORMS * bool(self.ffn.beside) + ("post_layer_norm",) * bool(self.embed_size)
        shapes: Shapes = {}
        for norm in norms:
            shapes |= dict.fromkeys([norm, f"{norm}_bias"] if has_norm_bias else [norm], (hidden,))
        shapes |= self.mixer.parameters()
        experts = self.ffn.experts
        if experts:
            shapes |= of_router("", experts, hidden)
        if self.has_factor:
            shapes["factor"] = (1,)
        for name, (parts, has_bias) in linears.items():
            prefixes = [""]
            if experts and name in ("gate_up", "down"):
                prefixes = [f"experts.{e}." for e in range(experts.all_experts)]
            for prefix in prefixes:
                for part, shape in parts.items():
                    shapes[f"{prefix}{part}.weight"] = shape
                    if has_bias:
                        shapes[f"{prefix}{part}.bias"] = shape[:1]
        return shapes
