"""Guessing how a request goes on, and when that pays.

The target samples with noise by position (C4), so a guess is right exactly if it equals the token that the target
itself samples there; nothing is resampled, and with or without guesses the tokens are the same (arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

from runtime.core.request_state import RequestState

MOST_GUESSES = 7  # of one row: with the known token before them, eight rows are what few-row products take at once
_PRIOR = 0.6  # a request's acceptance before anything is known of it, and where it drifts back to while it rests
_WEIGHT = 0.1  # of the newest guess in a request's estimate
_REST = 0.02  # of the prior, per token decoded without guesses: after some 50 tokens it is tried again


class Drafter(Protocol):
    """Where guesses come from. Called by the step thread alone, and never waits."""

    def guess(self, state: RequestState, most: int) -> list[int]:
        """Up to `most` tokens that may follow the request's known ones; empty if it has no idea."""
        ...

    def forget(self, state: RequestState) -> None:
        """The request has ended."""
        ...


class Ngram:
    """Prompt lookup: what followed the last time that the request's last tokens stood anywhere in it, prompt included
    (https://github.com/apoorvumang/prompt-lookup-decoding). A repetition may run on into its own guesses."""

    _SIZES = (4, 2)  # tokens that must agree, tried in this order

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, dict[bytes, int]]] = {}  # id -> tokens seen, n-gram -> where it ended

    def guess(self, state: RequestState, most: int) -> list[int]:
        tokens = state.tokens
        seen, ends = self._found.get(state.request.request_id, (0, {}))
        for size in self._SIZES:
            for end in range(max(seen, size), len(tokens)):  # not the last one: nothing follows it yet
                ends[tokens[end - size : end].tobytes()] = end
        self._found[state.request.request_id] = len(tokens), ends
        for size in self._SIZES:
            if (after := ends.get(tokens[-size:].tobytes())) is not None:
                guesses: list[int] = []
                for at in range(after - len(tokens), after - len(tokens) + most):
                    guesses.append(tokens[at] if at < 0 else guesses[at])
                return guesses
        return []

    def forget(self, state: RequestState) -> None:
        self._found.pop(state.request.request_id, None)


class Speculation:
    """How many guesses a request gets: as many as its acceptance so far and the cost of a step let pay.

    A request with guesses cannot be planned before its last result is in, so each of its steps costs `latency_us` that
    two steps in flight would hide."""

    def __init__(
        self, drafter: Drafter, fixed: int | None, step_us: Sequence[tuple[int, float]], latency_us: float
    ) -> None:
        """`fixed` guesses always, or by estimate. step_us: (tokens, time of a step of so many rows), rising."""
        self.drafter, self._fixed, self._latency_us = drafter, fixed, latency_us
        self._step_us = tuple(step_us)
        self._num_rows = 1
        self._best = lru_cache(maxsize=4096)(self._compute_best)

    def begin(self, num_rows: int) -> None:
        """A step of about so many rows is being planned."""
        self._num_rows = num_rows

    def holds(self, state: RequestState) -> bool:
        """Whether a request whose last token is in flight is left out of this step, to be guessed for in the next."""
        pays = self._count(state) > 0
        if not pays:
            state.acceptance += _REST * (_PRIOR - state.acceptance)
        return pays

    def guess(self, state: RequestState, most: int) -> list[int]:
        """At most `most` tokens that may follow the request's known ones; empty if that would not pay."""
        count = min(most, self._count(state))
        if count <= 0:
            return []
        guesses = self.drafter.guess(state, count)
        if not guesses:
            self.learn(state, False)
        return guesses

    def learn(self, state: RequestState, right: bool) -> None:
        """A guess was right, or wrong, or there was none; those after a wrong one tell nothing."""
        state.acceptance += _WEIGHT * (right - state.acceptance)

    def _count(self, state: RequestState) -> int:
        if self._fixed is not None:
            return self._fixed
        if state.acceptance < 0:
            state.acceptance = _PRIOR
        return self._best(self._num_rows, round(state.acceptance * 40))

    def _compute_best(self, num_rows: int, acceptance_40ths: int) -> int:
        """The count that yields the most tokens a second, were all rows alike; 0 if plain steps do."""
        rate = min(acceptance_40ths / 40, 0.975)
        best, most = 0, 1 / self._cost(num_rows)
        for count in range(1, MOST_GUESSES + 1):
            tokens = (1 - rate ** (count + 1)) / (1 - rate)
            speed = tokens / (self._latency_us + self._cost(num_rows * (1 + count)))
            if speed > most:
                best, most = count, speed
        return best

    def _cost(self, num_tokens: int) -> float:
        """Microseconds, between what was measured and beyond it in proportion."""
        points = self._step_us or ((1, 1.0),)
        if num_tokens <= points[0][0]:
            return points[0][1]
        for (a, low), (b, high) in pairwise(points):
            if num_tokens <= b:
                return low + (high - low) * (num_tokens - a) / (b - a)
        return points[-1][1] * num_tokens / points[-1][0]
