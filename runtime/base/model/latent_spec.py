"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) as data.

The cache has one vector for each token and layer: a latent with `rank` elements and a key's rotary part, which all
heads share. Every head's keys and values are projections of the latent."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.base.model.attention_spec import CachedShape
from runtime.base.model.mixer_spec import Linears, SchemeOf, Shapes
from runtime.base.model.rope_spec import RopeSpec
from runtime.base.shard import Shard, Share

_ROPE = RopeSpec()


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """The attention over latents of one layer."""

    num_heads: int
    rank: int  # width of the latent for keys and values
    rope_dim: int  # elements with rotary positions in a key and in each head's q
    nope_dim: int  # elements without positions in each head's k and q
    value_dim: int  # width of a head's v
    q_rank: int = 0  # width of q's latent; 0 if q is a projection of the hidden states
    norm_eps: float = 1e-6  # epsilon of both latents' norms
    split_up: bool = False  # the checkpoint has kv_b as two maps: k_b, a head's [rank, nope_dim], and v_b
    rope: RopeSpec = _ROPE
    scale: float | None = None  # the scores' factor; None for head_dim ** -0.5
    first_key: int = 0  # first position that any token sees: 0, or 1 where position 0 holds nothing (draft heads)

    num_kv_heads = 1
    kv_source = None
    window = 0

    @property
    def head_dim(self) -> int:
        """The width of a head's q."""
        return self.nope_dim + self.rope_dim

    @property
    def stored(self) -> int:
        """Cache elements per token and layer."""
        return self.rank + self.rope_dim

    @property
    def score_scale(self) -> float:
        """The factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def cached(self) -> CachedShape:
        """The shape of the cache: one vector."""
        return CachedShape(1, self.stored, vectors=1)

    @property
    def expanded(self) -> int:
        """One head's rows in kv_b: its k without positions, then its v."""
        return self.nope_dim + self.value_dim

    @property
    def activations(self) -> int:
        """Elements per token between its maps: q, queries over latents, their results, and values."""
        per_head = self.head_dim + 2 * self.rank + self.value_dim
        return 2 * (self.q_rank + self.stored) + self.num_heads * per_head

    def has_whole_blocks(self, size: int) -> bool:
        """Return True if whole blocks of `size` make up a head's outputs in both kv_b maps."""
        return self.rank % size == 0 and self.value_dim % size == 0

    def is_divided_by(self, size: int) -> bool:
        """Return True if a group of that many ranks can divide the heads."""
        return self.num_heads % size == 0

    def of_rank(self, size: int) -> LatentSpec:
        """Return one rank's attention, among `size`."""
        return replace(self, num_heads=self.num_heads // size)

    def reorders(self, name: str) -> bool:
        """Return True if loading permutes rows of this fused map: never."""
        return False

    def linears(self, hidden: int, scheme_of: SchemeOf) -> Linears:
        """Return the maps. The two input maps are one, unless kv_a ends within a block of shared scales."""
        q = self.num_heads * self.head_dim
        first: Shapes = {"q_a": (self.q_rank, hidden)} if self.q_rank else {"q": (q, hidden)}
        kv_a: Shapes = {"kv_a": (self.stored, hidden)}
        kv_scheme, q_scheme = scheme_of("kv_a"), scheme_of(next(iter(first)))
        can_fuse = kv_scheme == q_scheme and (kv_scheme is None or self.stored % (kv_scheme.scale_rows or 1) == 0)
        into: Linears = {"latent_in": (first | kv_a, False)}
        if not can_fuse:
            into = {"latent_in": (first, False), "latent_kv": (kv_a, False)}
        if self.q_rank:
            into |= {"latent_q": ({"q_b": (q, self.q_rank)}, False)}
        up: Linears = {"kv_b": ({"kv_b": (self.num_heads * self.expanded, self.rank)}, False)}
        if self.split_up:
            keys, values = (self.num_heads * self.rank, self.nope_dim), (self.num_heads * self.value_dim, self.rank)
            up = {"k_b": ({"k_b": keys}, False), "v_b": ({"v_b": values}, False)}
        return into | up | {"out": ({"out": (hidden, self.num_heads * self.value_dim)}, False)}

    def parameters(self) -> Shapes:
        """Return the shapes of the norms."""
        norms: Shapes = {"q_a_norm": (self.q_rank,)} if self.q_rank else {}
        return norms | {"kv_a_norm": (self.rank,)}

    def shares(self, whole: LatentSpec, shard: Shard, part: str) -> list[Share]:
        """Return a rank's share of the map in a parameter. Each rank has the maps to latents whole."""
        whole_maps = {"q_a": self.q_rank, "kv_a": self.stored}
        if part in whole_maps:
            return [Share(range(whole_maps[part]), whole_maps[part])]
        sizes = {
            "q": self.head_dim, "q_b": self.head_dim, "kv_b": self.expanded, "k_b": self.rank, "v_b": self.value_dim,
            "out": self.value_dim,
        }  # fmt: skip
        return [shard.share(self.num_heads * sizes[part])]
