"""SplitLogits: makes one choice from all ranks' logits. Each rank has the logits for its rows of the output head.

A row's parameters decide how the ranks agree:

- Only the best token, greedy or with noise: `best` takes the ranks' largest key.
- Filters, penalties, biases, masks, log-probabilities: `whole` gathers all logits, and every rank draws the same token.
- A grammar, which only rank 0 follows: `of_first_rank` takes rank 0's token.

All ranks have the same requests in the same slots, so they call the same methods. With one rank nothing is done."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from runtime.base.shard import Shard
from runtime.kernels.collectives.communicator import Communicator, OneRank


class SplitLogits:
    """The parts of a vocabulary, and the exchange between ranks."""

    def __init__(self, vocab_size: int, ranks: Communicator | None = None) -> None:
        self.vocab_size, self.ranks = vocab_size, ranks or OneRank()
        rank, size = self.ranks.rank, self.ranks.size
        self.is_split = size > 1
        self.own_ids = Shard(rank, size).vocabulary(vocab_size)  # ids in this rank's logits
        self._width = len(Shard(0, size).vocabulary(vocab_size))

    def whole(self, logits: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """[n, vocab] from every rank's [n, own_ids] of the same rows. Rows may lie further apart than `vocab`. Rows
        with 0 in `wanted` [n] int32 may hold anything."""
        if not self.is_split:
            return logits
        if missing := self._width - len(self.own_ids):
            logits = F.pad(logits, (0, missing))
        return self.ranks.all_gather(logits, wanted)[:, : self.vocab_size]

    def best(self, keys: torch.Tensor) -> torch.Tensor:
        """Replace this rank's keys (kernels/sampling/token_keys.py) [n] int64 by the largest of all ranks."""
        return self.ranks.all_max(keys)

    def of_first_rank(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The token ids [n] of rank 0, on all ranks."""
        keys = token_ids.long() if self.ranks.rank == 0 else torch.full_like(token_ids, -2, dtype=torch.int64)
        return self.ranks.all_max(keys).to(token_ids.dtype)
