"""PastOutputs: the outputs of requests that have ended, indexed by their n-grams.

    old generation   [out, out, ..., out]            full; dropped as a whole when the new one is full
    new generation   [out, out, ...          room]   its text: -1, output, -1, output, ...

The oldest outputs leave first, without a search. Each output has an owner, and a look-up finds its owner's outputs
alone. So no request's speed depends on another owner's texts (C5).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable

import numpy as np

from runtime.speculation.gram_chains import GramChains, Longest, mixed

PIECE_COST = 512  # fixed work for a piece of a text, besides its tokens
SIZE = 5  # tokens of the n-grams that are indexed
_SEPARATOR = -1  # stands before each output: no token equals it
_ENOUGH = 16  # tokens; outputs are not searched if the request's own text has such a match


class _Generation:
    """Outputs of at most `capacity` tokens, separators included."""

    def __init__(self, capacity: int) -> None:
        self.text = array("i")
        self.chains = GramChains(capacity, [SIZE])
        self.starts: list[int] = []  # rising positions where outputs begin
        self.owners: list[Hashable] = []  # each output's owner
        self.num_indexed = 0  # n-grams that end up to here are indexed


class PastOutputs:
    """The last outputs of each owner. Nothing is kept with a capacity of 0."""

    def __init__(self, capacity: int) -> None:
        """Keep at most `capacity` tokens, separators included, in 12 to 16 bytes each."""
        self._capacity = capacity // 3  # most tokens in a generation; as many may wait
        self._generations: list[_Generation] = []  # the new one, then the old one
        self._pending: deque[tuple[Hashable, array[int]]] = deque()  # outputs that are not in the text yet
        self._num_pending = 0  # their tokens
        self.num_indexed = 0  # tokens indexed since the start

    def __len__(self) -> int:
        """Tokens that it holds."""
        return self._num_pending + sum(len(generation.text) for generation in self._generations)

    def clear(self) -> None:
        """Forget all outputs."""
        self._generations.clear()
        self._pending.clear()
        self._num_pending = 0

    def add(self, owner: Hashable, tokens: array[int]) -> None:
        """Keep an output. `advance` indexes it. Of one beyond the capacity the end is kept."""
        tokens = tokens[max(0, len(tokens) + 1 - self._capacity) :]
        if self._capacity and len(tokens) > SIZE:
            self._pending.append((owner, tokens))
            self._num_pending += len(tokens)
            while self._num_pending > self._capacity:
                self._num_pending -= len(self._pending.popleft()[1])

    def advance(self, work: int) -> None:
        """Index more outputs. Each token is a unit of `work`. An output's piece costs PIECE_COST more."""
        while work > 0:
            if not self._generations or self._generations[0].num_indexed == len(self._generations[0].text):
                if not self._pending:
                    return
                self._begin_output(*self._pending.popleft())
            new = self._generations[0]
            end = min(len(new.text), new.num_indexed + work)
            new.chains.insert(np.frombuffer(new.text, np.int32), new.num_indexed, end, salt=hash(new.owners[-1]))
            self.num_indexed += end - new.num_indexed
            work -= PIECE_COST + end - new.num_indexed
            new.num_indexed = end

    def _begin_output(self, owner: Hashable, tokens: array[int]) -> None:
        self._num_pending -= len(tokens)
        if not self._generations or len(self._generations[0].text) + 1 + len(tokens) > self._capacity:
            self._generations = [_Generation(self._capacity), *self._generations[:1]]
        new = self._generations[0]
        new.num_indexed = len(new.text)
        new.starts.append(len(new.text))
        new.owners.append(owner)
        new.text.append(_SEPARATOR)
        new.text.extend(tokens)

    def search(self, owner: Hashable, tail: array[int], longest: Longest) -> None:
        """Offer `longest` the owner's outputs that match more tokens of `tail` than it has."""
        if not self._generations or longest.length >= _ENOUGH or len(tail) < SIZE:
            return
        gram = hash(owner) + mixed(tail, SIZE)
        for generation in self._generations:
            text = generation.text
            for end in generation.chains.ends(SIZE, gram):
                if generation.owners[bisect_right(generation.starts, end - 1) - 1] == owner:
                    longest.offer(SIZE, text[max(0, end - len(tail)) : end], end, text)

    @staticmethod
    def after(text: array[int], at: int, most: int) -> list[int]:
        """Return up to `most` tokens of an output from `at` on."""
        tokens = text[at : at + most].tolist()
        return tokens[: tokens.index(_SEPARATOR)] if _SEPARATOR in tokens else tokens
