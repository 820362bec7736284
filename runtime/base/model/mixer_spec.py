"""Mixers as data: the part of a layer in which a token meets the tokens before it.

Attention is in `attention_spec.py` and `latent_spec.py`. These mixers summarize a request in a fixed-size state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from runtime.base.kv_cache_spec import StateGroupSpec
from runtime.base.shard import Shard, Share

Shapes = dict[str, tuple[int, ...]]
Linears = dict[str, tuple[Shapes, bool]]  # fused name -> ({part: (out, in) shape}, has a bias), parts in row order
SchemeOf = Callable[[str], Any]  # a part's quantization scheme, or None


class StateMixerSpec:
    """A mixer without heads of keys and values."""

    __slots__ = ()
    num_heads = num_kv_heads = activations = 0

    def reorders(self, name: str) -> bool:
        """Return True if loading permutes rows of this fused map (runtime.models.linear_maps.row_order)."""
        return False


@dataclass(frozen=True, slots=True)
class DeltaRuleSpec(StateMixerSpec):
    """The gated delta rule (arXiv 2412.06464), behind a causal convolution of q, k and v."""

    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # width of a q or k head
    value_dim: int  # width of a v head
    width: int  # tokens that the convolution sees
    by_key_head: bool = False  # the checkpoint has q, k, v and z in one map, rate and decay in one, rows by key head
    tiled: bool = False  # value head h has key head h % key_heads, as in GGUF files; else neighbours share one

    @property
    def values(self) -> int:
        """The width of all v heads, and of z, the output gate."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The convolution's channels: all heads of q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.values

    def is_divided_by(self, size: int) -> bool:
        """Return True if a group of that many ranks can divide the heads."""
        return self.key_heads % size == 0

    def of_rank(self, size: int) -> DeltaRuleSpec:
        """Return one rank's mixer, among `size`."""
        return replace(self, key_heads=self.key_heads // size, value_heads=self.value_heads // size)

    def state(self, layers: tuple[int, ...], dtype: str) -> StateGroupSpec:
        """Return the states of these layers."""
        return StateGroupSpec(layers, self.channels, dtype, self.value_heads, self.key_dim, self.value_dim)

    def reorders(self, name: str) -> bool:
        """Return True if loading permutes rows of this fused map."""
        return self.by_key_head and name in ("mix_in", "mix_gates")

    def linears(self, hidden: int, scheme_of: SchemeOf) -> Linears:
        """Return the maps. Rate and decay are separate if they are quantized differently from the others."""
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

    def shares(self, whole: DeltaRuleSpec, shard: Shard, part: str) -> list[Share]:
        """Return a rank's shares of the maps in a parameter."""
        # A rank's key heads have tiled value heads in several ranges.
        tiles = self.value_heads // self.key_heads if self.tiled else 1
        keys, values = shard.share(self.key_heads * self.key_dim), [shard.share(self.values // tiles)] * tiles
        heads = [shard.share(self.value_heads // tiles)] * tiles
        return {
            "mix_qkv": [keys, keys, *values], "conv": [keys, keys, *values], "mix_z": values, "mix_out": values,
            "mix_b": heads, "mix_a": heads, "decay_log": heads, "decay_bias": heads,
            "mix_qkvz": [shard.share(self.channels + self.values)], "mix_ba": [shard.share(2 * self.value_heads)],
        }[part]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShortConvSpec(StateMixerSpec):
    """A gated causal convolution (LFM2)."""

    channels: int  # the model's hidden size, or a rank's share
    width: int  # tokens that it sees
    bias: bool = False  # the convolution and the maps around it have one

    def is_divided_by(self, size: int) -> bool:
        """Return True if a group of that many ranks can divide the channels."""
        return self.channels % size == 0

    def of_rank(self, size: int) -> ShortConvSpec:
        """Return one rank's mixer, among `size`."""
        return replace(self, channels=self.channels // size)

    def state(self, layers: tuple[int, ...], dtype: str) -> StateGroupSpec:
        """Return the states of these layers."""
        return StateGroupSpec(layers, self.channels, dtype)

    def linears(self, hidden: int, scheme_of: SchemeOf) -> Linears:
        """Return the maps: input gate, output gate and x as one."""
        into: Shapes = {"mix_in": (3 * self.channels, hidden)}
        return {"mix_in": (into, self.bias), "mix_out": ({"mix_out": (hidden, self.channels)}, self.bias)}

    def parameters(self) -> Shapes:
        """Return the shapes of the other parameters."""
        conv: Shapes = {"conv": (self.channels, 1, self.width)}
        return conv | {"conv_bias": (self.channels,)} if self.bias else conv

    def shares(self, whole: ShortConvSpec, shard: Shard, part: str) -> list[Share]:
        """Return a rank's shares of the maps in a parameter."""
        return [shard.share(self.channels)] * (3 if part == "mix_in" else 1)
