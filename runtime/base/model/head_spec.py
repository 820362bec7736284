"""HeadSpec: a head that drafts tokens from its target's hidden states, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.layer_spec import LayerSpec
from runtime.base.shard import Shard


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A head's layers, and its inputs from the target.

    A head without a cache reads keys and values of its target's layers (`kv_source`). One with a cache computes a
    position's from its token, and from the target's feature one position earlier. So they depend on the tokens up to
    there alone, as the target's do (C5). Position 0 has none: its layers have `first_key` 1."""

    kind: str  # mtp, eagle3, eagle or assistant: which forward pass (runtime/models/heads)
    decoder: DecoderSpec  # its layers and other parameters; the vocabulary is the target's
    target_hidden: int  # the target's hidden size
    taps: tuple[int, ...] = ()  # a token's feature is the input of these target layers; () for the final norm's output
    own_embedding: bool = False  # False if it reads the target's token embedding
    own_head: bool = False  # False if it uses the target's output head
    num_ids: int = 0  # token ids with a logit, others have -inf (d2t, centroids); 0 if all have one
    flags: frozenset[str] = frozenset()  # variants of the forward pass, such as norm_before_residual

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers, which follow the target's in the KV cache."""
        return self.decoder.layers

    @property
    def has_cache(self) -> bool:
        """False if all layers read the target's keys and values, and write none."""
        return any(mixer.kv_source is None for mixer in self.decoder.attentions.values())

    @property
    def block_width(self) -> int:
        """Elements that the head keeps for each KV block."""
        return self.decoder.hidden_size if self.has_cache else 0

    @property
    def feature_width(self) -> int:
        """Elements that the target leaves for each token."""
        return self.target_hidden * max(1, len(self.taps))

    def for_rank(self, shard: Shard) -> HeadSpec:
        """Return the spec for one rank in a tensor-parallel group."""
        return replace(self, decoder=self.decoder.of_rank(shard))
