"""Mixers: what a layer has in place of attention, as data. Each summarizes a request in a state of fixed size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Shapes = dict[str, tuple[int, ...]]
Linears = dict[str, tuple[Shapes, bool]]  # fused name -> ({part: (out, in) shape}, has a bias), parts in row order


@dataclass(frozen=True, slots=True)
class DeltaRuleSpec:
    """The gated delta rule (arXiv 2412.06464), behind a causal convolution of q, k and v."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # of a head of q and of k
    value_dim: int  # of a head of v
    width: int  # tokens that the convolution sees
    by_key_head: bool = False  # the checkpoint has q, k, v and z in one map, rate and decay in one, rows by key head
    tiled: bool = False  # value head h has key head h % key_heads, as in GGUF files; else neighbours share one

    @property
    def values(self) -> int:
        """The width of all heads of v, and of z, the gate of the output."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: all heads of q, of k and of v."""
        return 2 * self.key_heads * self.key_dim + self.values

    def is_divided_by(self, size: int) -> bool:
        """Return True if a group of that many ranks can divide the heads."""
        return self.key_heads % size == 0

    def of_rank(self, size: int) -> DeltaRuleSpec:
        """Return the mixer of one of `size` ranks."""
        return replace(self, key_heads=self.key_heads // size, value_heads=self.value_heads // size)

    def linears(self, hidden: int, scheme_of: Callable[[str], Any]) -> Linears:
        """Return the maps. Those of rate and decay are apart if their quantization differs from that of the others.

        `scheme_of` returns the scheme of a part, or None."""
        heads, wide = self.value_heads, self.channels + self.values
        parts: Shapes = {"mix_qkv": (self.channels, hidden), "mix_z": (self.values, hidden)}
        gates: Shapes = {"mix_b": (heads, hidden), "mix_a": (heads, hidden)}
        if self.by_key_head:
            parts, gates = {"mix_qkvz": (wide, hidden)}, {"mix_ba": (2 * heads, hidden)}
        out: Linears = {"mix_out": ({"mix_out": (hidden, self.values)}, False)}
        if scheme_of(next(iter(parts))) == scheme_of(next(iter(gates))):
            return {"mix_in": (parts | gates, False), **out}
        return {"mix_in": (parts, False), "mix_gates": (gates, False), **out}

    def parameters(self) -> Shapes:
        """Return the shapes of the other parameters."""
        heads, conv = (self.value_heads,), (self.channels, 1, self.width)
        return {"conv": conv, "decay_log": heads, "decay_bias": heads, "mix_norm": (self.value_dim,)}


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A gated causal convolution (LFM2)."""

    channels: int  # the model's hidden size, or a rank's share
    width: int  # tokens that it sees
    bias: bool = False  # of the convolution and of the maps around it

    def is_divided_by(self, size: int) -> bool:
        """Return True if a group of that many ranks can divide the channels."""
        return self.channels % size == 0

    def of_rank(self, size: int) -> ShortConvSpec:
        """Return the mixer of one of `size` ranks."""
        return replace(self, channels=self.channels // size)

    def linears(self, hidden: int, scheme_of: Callable[[str], Any]) -> Linears:
        """Return the maps: gate of the input, gate of the output and x as one."""
        into: Shapes = {"mix_in": (3 * self.channels, hidden)}
        return {"mix_in": (into, self.bias), "mix_out": ({"mix_out": (hidden, self.channels)}, self.bias)}

    def parameters(self) -> Shapes:
        """Return the shapes of the other parameters."""
        conv: Shapes = {"conv": (self.channels, 1, self.width)}
        return conv | {"conv_bias": (self.channels,)} if self.bias else conv


MixerSpec = DeltaRuleSpec | ShortConvSpec
