"""Attention with grouped queries as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from runtime.base.model.mixer_spec import Linears, SchemeOf, Shapes
from runtime.base.model.rope_spec import RopeSpec
from runtime.base.shard import Shard, Share

_ROPE = RopeSpec()


class CachedShape(NamedTuple):
    """What a layer's KV cache holds for one token."""

    num_kv_heads: int
    head_dim: int
    vectors: int = 2  # k and v; 1 for a latent, which is both


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec = _ROPE
    window: int = 0  # positions that a token sees, itself included; 0 for all
    scale: float | None = None  # the scores' factor; None for head_dim ** -0.5
    soft_cap: float = 0.0  # scores become cap * tanh(score / cap); 0 for none
    sinks: bool = False  # each query head has a logit that joins its softmax, without a value
    qk_norm: Literal["none", "head", "all"] = "none"  # RMSNorm on q and k before RoPE: over a head, over all at once
    v_norm: bool = False  # RMSNorm without a weight over each v head; needs qk_norm of heads
    qkv_bias: bool = False
    out_bias: bool = False
    output_gate: bool = False  # q's map also makes a gate; the output is multiplied by sigmoid(gate)
    input_factor: int = 1  # inputs of q, k and v per hidden size: 2 if an embedding lies before the hidden states
    fused_qkv: bool = False  # the checkpoint has q, k and v as one tensor
    keys_as_values: bool = False  # k before its norm is v
    whole_images: bool = False  # an image's tokens see each other
    first_key: int = 0  # first position that any token sees: 0, or 1 where position 0 holds nothing (draft heads)
    kv_source: int | None = None  # the earlier layer with its keys and values; None if it stores them

    @property
    def score_scale(self) -> float:
        """The factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def cached(self) -> CachedShape:
        """The shape of its keys and values."""
        return CachedShape(self.num_kv_heads, self.head_dim)

    @property
    def rope_dim(self) -> int:
        """Elements of a head that the rotary table is for."""
        return self.head_dim

    @property
    def activations(self) -> int:
        """Elements per token between its maps."""
        return 2 * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def is_divided_by(self, size: int) -> bool:
        """Return True if a group of that many ranks can divide the heads."""
        return self.num_heads % size == 0 and (self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0)

    def of_rank(self, size: int) -> AttentionSpec:
        """Return one rank's attention, among `size`."""
        return replace(self, num_heads=self.num_heads // size, num_kv_heads=max(1, self.num_kv_heads // size))

    def reorders(self, name: str) -> bool:
        """Return True if loading permutes rows of this fused map (runtime.models.linear_maps.row_order)."""
        return name == "qkv" and (self.rope.reorders_heads or self.output_gate)

    def linears(self, hidden: int, scheme_of: SchemeOf) -> Linears:
        """Return the maps: q, and k and v unless they are shared."""
        q, kv, inputs = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.input_factor * hidden
        qkv: Shapes = {"gated_q": (2 * q, inputs)} if self.output_gate else {"q": (q, inputs)}
        if self.kv_source is None:
            qkv |= {"k": (kv, inputs)} if self.keys_as_values else {"k": (kv, inputs), "v": (kv, inputs)}
        if self.fused_qkv:
            qkv = {"qkv": (q + 2 * kv, inputs)}
        return {"qkv": (qkv, self.qkv_bias), "out": ({"out": (hidden, q)}, self.out_bias)}

    def parameters(self) -> Shapes:
        """Return the shapes of the other parameters."""
        sinks: Shapes = {"sinks": (self.num_heads,)} if self.sinks else {}
        if self.qk_norm == "none":
            return sinks
        if self.qk_norm == "all":
            heads = {"q_heads_norm": self.num_heads, "k_heads_norm": self.num_kv_heads}
            return sinks | {name: (count * self.head_dim,) for name, count in heads.items()}
        norms = ["q_norm", "k_norm"] if self.kv_source is None else ["q_norm"]
        return sinks | dict.fromkeys(norms, (self.head_dim,))

    def shares(self, whole: AttentionSpec, shard: Shard, part: str) -> list[Share]:
        """Return a rank's shares of a parameter's maps. Ranks may share a k and v head."""
        heads, dim = shard.share(self.num_heads * self.head_dim), self.head_dim
        first = shard.rank * whole.num_kv_heads // shard.size
        kv = Share(range(first * dim, (first + self.num_kv_heads) * dim), whole.num_kv_heads * dim)
        return {
            "q": [heads], "k": [kv], "v": [kv], "qkv": [heads, kv, kv], "out": [heads], "q_gate": [heads],
            "q_heads_norm": [heads], "k_heads_norm": [kv], "sinks": [shard.share(self.num_heads)],
            "gated_q": [shard.share(2 * self.num_heads * dim)],
        }[part]  # fmt: skip
