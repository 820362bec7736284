"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) as data.

The cache has one vector for each token and layer. It consists of a latent of `rank` numbers and of a key's rotary part,
which all heads share. Keys and values of every head are linear maps of the latent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.base.model.mixer_spec import Linears, Shapes


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """The sizes of a layer. DecoderSpec.head_dim is `nope_dim + rope_dim`."""

    rank: int  # of the latent of keys and values
    rope_dim: int  # numbers of a key and of each head's q with rotary positions
    nope_dim: int  # numbers of each head's k and q without positions
    value_dim: int  # of a head
    q_rank: int = 0  # of the latent of q; 0 if q is a map of the hidden states
    norm_eps: float = 1e-6  # of the norms of both latents
    split_up: bool = False  # the checkpoint has kv_b as two maps: k_b, a head's [rank, nope_dim], and v_b

    @property
    def stored(self) -> int:
        """The numbers of a token in the cache of a layer."""
        return self.rank + self.rope_dim

    @property
    def expanded(self) -> int:
        """The rows of kv_b of one head: its k without positions, then its v."""
        return self.nope_dim + self.value_dim

    def has_whole_blocks(self, size: int) -> bool:
        """Return True if a head's outputs of both maps of kv_b consist of whole blocks of `size`."""
        return self.rank % size == 0 and self.value_dim % size == 0

    def linears(self, num_heads: int, hidden: int, scheme_of: Callable[[str], Any]) -> Linears:
        """Return the maps. Both maps of the hidden states are one, unless kv_a ends within a block of shared scales.

        `scheme_of` returns the scheme of a part, or None."""
        q = num_heads * (self.nope_dim + self.rope_dim)
        of_q: Shapes = {"q_a": (self.q_rank, hidden)} if self.q_rank else {"q": (q, hidden)}
        kv_a: Shapes = {"kv_a": (self.stored, hidden)}
        of_kv, of_first = scheme_of("kv_a"), scheme_of(next(iter(of_q)))
        is_one = of_kv == of_first and (of_kv is None or self.stored % (of_kv.scale_rows or 1) == 0)
        into: Linears = {"latent_in": (of_q | kv_a, False)}
        if not is_one:
            into = {"latent_in": (of_q, False), "latent_kv": (kv_a, False)}
        if self.q_rank:
            into |= {"latent_q": ({"q_b": (q, self.q_rank)}, False)}
        up: Linears = {"kv_b": ({"kv_b": (num_heads * self.expanded, self.rank)}, False)}
        if self.split_up:
            of_keys, of_values = (num_heads * self.rank, self.nope_dim), (num_heads * self.value_dim, self.rank)
            up = {"k_b": ({"k_b": of_keys}, False), "v_b": ({"v_b": of_values}, False)}
        return into | {
            **up,
            "out": ({"out": (hidden, num_heads * self.value_dim)}, False),
        }

    def parameters(self) -> Shapes:
        """Return the shapes of the norms."""
        of_q: Shapes = {"q_a_norm": (self.q_rank,)} if self.q_rank else {}
        return of_q | {"kv_a_norm": (self.rank,)}
