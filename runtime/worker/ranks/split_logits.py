"""SplitLogits: where the logits of ranks, each of its own rows of the output head, become what samplers take.

What a row asks for decides how its ranks agree:

- the best token alone (greedy, or with noise): a key a row, of which `best` takes the largest of all ranks
- filters, penalties, biases, masks, log-probabilities: all logits, from `whole`, of which every rank then makes the
  same token
- a grammar, which rank 0 alone follows (grammar_state.py): rank 0's token, `of_first_rank`

All ranks have the same requests in the same slots and so ask alike. With one rank nothing is done."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.kernels.collectives.communicator import Communicator, OneRank
from runtime.spec.sharding import Shard


class SplitLogits:
    """The parts of a vocabulary, and the ways from a rank's part to the whole."""

    def __init__(self, vocab_size: int, ranks: Communicator | None = None) -> None:
        self.vocab_size, self.ranks = vocab_size, ranks or OneRank()
        rank, size = self.ranks.rank, self.ranks.size
        self.is_split = size > 1
        self.own_ids = Shard(rank, size).vocabulary(vocab_size)  # of this rank's logits
        self._width = len(Shard(0, size).vocabulary(vocab_size))

    def whole(self, logits: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """[n, vocab] from every rank's [n, own_ids] of the same rows; the rows may lie further apart than `vocab`. Of
        rows where `wanted` [n] int32 is 0, they may be anything."""
        if not self.is_split:
            return logits
        if missing := self._width - len(self.own_ids):
            logits = F.pad(logits, (0, missing))
        return self.ranks.all_gather(logits, wanted)[:, : self.vocab_size]

    def best(self, keys: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' keys (kernels/sampling/token_keys.py) [n] int64, in place of this rank's."""
        return self.ranks.all_max(keys)

    def of_first_rank(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rank 0's [n], on all ranks; other ranks' do not count."""
        keys = token_ids.long() if self.ranks.rank == 0 else torch.full_like(token_ids, -2, dtype=torch.int64)
        return self.ranks.all_max(keys).to(token_ids.dtype)
