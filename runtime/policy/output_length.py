"""Estimates the tokens that an answer still gets: the scheduler admits as many requests as should fit to their end.

Only an answer that stops by itself shows its full length. If an answer ends at max_tokens, or still runs, its length is
censored: it did not stop before. The estimator therefore learns the hazard, not a mean length. The hazard at a length
is the share of answers that stop there, among all that reach it. A product over such shares is the survival curve of
Kaplan and Meier (1958, doi 10.2307/2281868). Here the hazard is constant within length spans that grow by the factor
1.4 (a piecewise exponential model). A curve is some thirty pairs of counts:

    hazard of a span = (answers that stopped in it + prior answers) / (tokens generated in it + prior tokens)

which is the posterior mean under a gamma prior. The prior hazard at length x is 3 / (600 + x): a new answer is expected
to have 300 tokens, and the expected rest grows with the length. The prior counts as 0.4 answers per span, so one answer
decides little and a few outweigh it. An answer that is longer than expected costs a preemption at worst. The estimate
begins far below a full context, so that a cold engine can fill its memory.

Requests with other limits have other answers: an answer cut at 16 tokens does not predict chats that may fill the
context. Each max_tokens class, a power of two wide, has its own counts, in which old answers fade."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

_EDGES = (0, *(base << shift for shift in range(28) for base in (8, 12)), 1 << 62)  # bounds of the spans
_PRIOR_ANSWERS = 0.4  # that stopped in each span
_PRIOR_TOKENS = tuple(_PRIOR_ANSWERS * (600 + (a + min(b, 2 * a + 8)) / 2) / 3 for a, b in pairwise(_EDGES))
_KEPT = 1 - 1 / 256  # share of the counts that remains when an answer ends: some 256 answers are remembered
_MOST_WEIGHT = 1e12  # an observation's weight; the first one has 1
_REST = 0.01  # a smaller share of answers counts as none


class _Curve:
    """One class's answer counts by length span, without the prior. New answers count with growing weight, so old ones
    fade."""

    __slots__ = ("stops", "tokens", "weight")

    def __init__(self) -> None:
        self.stops, self.tokens = [0.0] * len(_PRIOR_TOKENS), [0.0] * len(_PRIOR_TOKENS)
        self.weight = 1.0

    def fade(self) -> None:
        """Reduce the weight of the answers so far, because one has ended."""
        self.weight /= _KEPT
        if self.weight > _MOST_WEIGHT:
            self.stops = [count / self.weight for count in self.stops]
            self.tokens = [count / self.weight for count in self.tokens]
            self.weight = 1.0

    def hazard(self, span: int) -> float:
        """Return the share of answers that stop at a token in this span."""
        stops = self.stops[span] + self.weight * _PRIOR_ANSWERS
        return stops / (self.tokens[span] + self.weight * _PRIOR_TOKENS[span])


class OutputLengthEstimator:
    """Learns lengths from pieces of answers; all lengths count output tokens. Pure: no clock, no chance."""

    def __init__(self) -> None:
        self._curves: dict[int, _Curve] = {}

    def observe(self, max_tokens: int, start: int, end: int) -> None:
        """Count an answer with this limit that grew from length `start` to `end` without a stop."""
        if start >= end:
            return
        curve, span = self._curve(max_tokens), bisect_right(_EDGES, start) - 1
        while start < end:
            upto = min(end, _EDGES[span + 1])
            curve.tokens[span] += (upto - start) * curve.weight
            start, span = upto, span + 1

    def observe_end(self, max_tokens: int, length: int, stopped: bool) -> None:
        """Count the end of an answer at this length, by itself (`stopped`) or by a limit."""
        curve = self._curve(max_tokens)
        if stopped:
            curve.stops[bisect_right(_EDGES, max(0, length - 1)) - 1] += curve.weight
        curve.fade()

    def expect(self, max_tokens: int, length: int) -> tuple[float, int]:
        """Return the expected further tokens of an answer at `length`, and the length at which to estimate again."""
        curve, first = self._curve(max_tokens), bisect_right(_EDGES, length) - 1
        at, share, more = length, 1.0, 0.0
        for span in range(first, len(_PRIOR_TOKENS)):
            end = min(max_tokens, _EDGES[span + 1])
            if end <= at or share < _REST:
                break
            half = (end - at) * curve.hazard(span) / 2
            left = share * max(0.0, (1 - half) / (1 + half))  # if stops are spread evenly over the span
            more += (end - at) * (share + left) / 2
            at, share = end, left
        return more, _EDGES[first + 1]

    def _curve(self, max_tokens: int) -> _Curve:
        key = max_tokens.bit_length()
        if key not in self._curves:
            self._curves[key] = _Curve()
        return self._curves[key]
