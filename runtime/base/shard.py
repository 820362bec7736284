"""A rank's place in a tensor-parallel group."""

from __future__ import annotations

from typing import NamedTuple

# Pieces of a parameter with the same bounds in groups of 1, 2, 4 and 8 ranks. Each rank has whole pieces.
NUM_LEAVES = 8


class Share(NamedTuple):
    """A rank's range of a dimension, and the dimension's length in the whole model."""

    own: range
    length: int


class Shard(NamedTuple):
    """A rank and the size of its group."""

    rank: int = 0
    size: int = 1

    def share(self, own: int) -> Share:
        """Return the rank's share of a dimension that all ranks divide into equal parts of length `own`."""
        return Share(range(self.rank * own, (self.rank + 1) * own), own * self.size)

    def vocabulary(self, vocab_size: int) -> range:
        """Return the token ids of a rank's rows of the embedding and of the head.

        All ranks have the same number, except the last ones if the vocabulary does not divide evenly."""
        share = -(-vocab_size // self.size)
        if NUM_LEAVES % self.size == 0:
            share = -(-vocab_size // NUM_LEAVES) * (NUM_LEAVES // self.size)
        return range(min(self.rank * share, vocab_size), min((self.rank + 1) * share, vocab_size))

    def inner(self, size: int, unit: int) -> range:
        """Return a rank's part of the intermediate values of experts.

        Parts consist of whole units if there is one for each rank. If the units do not divide evenly, the first ranks
        have one more."""
        if size % (self.size * unit) == 0 or size // unit < self.size or unit == 1:
            return range(self.rank * size // self.size, (self.rank + 1) * size // self.size)
        least, more = divmod(size // unit, self.size)
        first = self.rank * least + min(self.rank, more)
        return range(first * unit, (first + least + (self.rank < more)) * unit)


ALONE = Shard()  # a whole model
