"""GramChains: finds where n-grams stand in a text, the newest first.

    bucket of an n-gram  ->  its oldest end  ->  its newest end  ->  an older one  ->  ...  ->  its oldest end

Each bucket is a circle of links, like LZ77's hash chains. So older and newer n-grams both enter it in constant time.
Numpy adds thousands at once. A bucket may hold several n-grams: the caller compares tokens.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from operator import mul

import numpy as np

from runtime.base.arrays import Int32s
from runtime.base.types import TOKEN_BYTES

_MASK = (1 << 64) - 1
_MAX_SIZE = 5  # tokens of the largest n-gram
DEPTH = 32  # tokens of a match that are compared; a longer one counts as this long
MAX_LINKS = 4  # ends of one n-gram that a look-up compares
_TOKEN_BITS = 8 * TOKEN_BYTES
# Odd and random at each start, so that clients cannot choose tokens that collide.
_FACTORS = [secrets.randbits(64) | 1 for _ in range(_MAX_SIZE)]


class GramChains:
    """Where the n-grams with these `sizes` end in a text, which has up to `capacity` tokens.

    Memory: 4 bytes a token for each size, and 4 to 8 for its buckets."""

    def __init__(self, capacity: int, sizes: Sequence[int]) -> None:
        self._shift = 64 - max(1, capacity.bit_length())  # one bucket or two for each token
        # Each bucket's oldest end, 0 if it is empty; and each end's next one in its circle.
        self._oldest = {size: array("i", bytes(TOKEN_BYTES << (64 - self._shift))) for size in sizes}
        self._links = {size: array("i", bytes(TOKEN_BYTES * (capacity + 1))) for size in sizes}

    def insert(self, text: Int32s, start: int, end: int, older: bool = False, salt: int = 0) -> None:
        """Add the n-grams that end within (start, end]. They lie before all others if they are `older`, else behind.

        Other salts have other buckets, so that one's n-grams do not hide another's."""
        for size in self._links:
            if (first := max(start, size - 1)) >= end:
                continue  # no n-gram of this size begins within the text
            sums = np.full(end - first, salt & _MASK, np.uint64)
            for back, factor in enumerate(_FACTORS[:size]):
                sums += text[first - back : end - back].astype(np.uint64) * np.uint64(factor)
            buckets = (sums >> np.uint64(self._shift)).astype(np.int32)
            self._link(size, buckets, np.arange(first + 1, end + 1, dtype=np.int32), older)

    def _link(self, size: int, buckets: Int32s, ends: Int32s, older: bool) -> None:
        links, oldest = (np.frombuffer(arrays[size], np.int32) for arrays in (self._links, self._oldest))
        order = np.argsort(buckets, kind="stable")
        buckets, ends = buckets[order], ends[order]
        is_new = np.ones(len(ends) + 1, np.bool_)
        np.not_equal(buckets[1:], buckets[:-1], out=is_new[1:-1])
        links[ends[1:]] = ends[:-1]  # right within a bucket; each bucket's first end gets its link below
        firsts, lasts, buckets = ends[is_new[:-1]], ends[is_new[1:]], buckets[is_new[:-1]]
        known = oldest[buckets]
        is_known = known > 0
        links[firsts] = np.where(is_known, links[known], lasts)
        links[known[is_known]] = lasts[is_known]
        if older:
            oldest[buckets] = firsts
        else:
            oldest[buckets[~is_known]] = firsts[~is_known]

    def ends(self, size: int, gram: int) -> list[int]:
        """Return the newest MAX_LINKS ends in the bucket of `gram`, the newest first. `gram` is the n-gram's `mixed`
        sum, plus its salt."""
        oldest, links = self._oldest[size][(gram & _MASK) >> self._shift], self._links[size]
        found: list[int] = []
        at = oldest
        while at and len(found) < MAX_LINKS:
            at = links[at]
            found.append(at)
            if at == oldest:
                break
        return found


def mixed(tail: Sequence[int], size: int) -> int:
    """Return the sum that chooses the bucket of `tail`'s last `size` tokens."""
    return sum(map(mul, tail[-1 : -1 - size : -1], _FACTORS))


class Longest:
    """The places with the most tokens in common with a request's last ones, among all that were searched."""

    __slots__ = ("_bits", "_tail", "ends", "length", "num_compared", "text")

    def __init__(self, tail: array[int]) -> None:
        """`tail` has the last DEPTH tokens, or all if there are fewer."""
        self._bits = _TOKEN_BITS * len(tail)
        self._tail = int.from_bytes(tail, "little")  # the last token is in the highest bits
        self.length = 0  # tokens in common
        self.ends: list[int] = []  # ends of the places that have these, the newest first
        self.text: array[int] | None = None  # the earlier output that `ends` are in; None for the request's own text
        self.num_compared = 0

    def offer(self, size: int, before: array[int], end: int, text: array[int] | None = None) -> None:
        """Compare the tokens `before` a place, at most the tail's number, with the tail.

        A match has at least `size` tokens in common."""
        self.num_compared += 1
        other, num_bits = int.from_bytes(before, "little"), _TOKEN_BITS * len(before)
        if num_bits < self._bits:
            other <<= self._bits - num_bits
        length = min(num_bits, self._bits - (self._tail ^ other).bit_length()) // _TOKEN_BITS
        if length > self.length:
            if length >= size:
                self.length, self.ends, self.text = length, [end], text
        elif length == self.length and length >= size and text is self.text:
            self.ends.append(end)
