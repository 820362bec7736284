"""Acceptance: the chance that each draft token is accepted, by its position in the draft.

    chance of a request's draft token i, if those before it are accepted  =  rates[i] + the request's offset

Rates are shared by all requests: a head is often right at its first token and seldom at its third. An offset moves
all rates of one request: its text may be easier or harder than others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from runtime.base.types import MAX_MATCHED_TOKENS
from runtime.core.request_state import RequestState

_MOST = 0.975  # limit for a chance
_LEAST_LIKELY = 0.1  # a draft token accepted less often is not worth its place in a step
_WEIGHT, _LEAST_WEIGHT = 0.02, 0.005  # weight of a request's newest draft token in its offset; the least in a rate
_DOUBT = 8  # draft tokens that an old rate counts as, once it is doubted
_REST_WEIGHT = 0.01  # share of an offset that a request without draft tokens loses a step


class Acceptance:
    """Estimates by position, and for each live request that has had draft tokens."""

    def __init__(self, first: float) -> None:
        """All rates begin at `first`."""
        self.rates = [first] * MAX_MATCHED_TOKENS
        self._num_seen = [0] * MAX_MATCHED_TOKENS  # draft tokens behind each rate
        self._offsets: dict[RequestState, float] = {}
        self._rounded = _in_40ths(self.rates)
        self._likely = lru_cache(maxsize=1024)(_num_likely)

    def record(self, state: RequestState, position: int, right: bool) -> None:
        """Count a draft token after right ones. A missing one is wrong."""
        rate, offset = self.rates[position], self._offsets.get(state, 0.0)
        self._offsets[state] = offset + _WEIGHT * (right - min(max(rate + offset, 0.0), 1.0))
        self._num_seen[position] = seen = self._num_seen[position] + 1
        self.rates[position] = rate + max(_LEAST_WEIGHT, 1 / (_DOUBT + seen)) * (right - rate)

    def doubt(self, position: int) -> None:
        """The position is tried after a while without draft tokens: its rate follows the next few at once."""
        self._num_seen[position] = 0

    def rest(self, state: RequestState) -> None:
        """A request drafts nothing in a step. Good drafts have runs of rejected tokens, too: its offset fades."""
        if offset := self._offsets.get(state, 0.0):
            self._offsets[state] = offset * (1 - _REST_WEIGHT)

    def forget(self, state: RequestState) -> None:
        """Drop the offset of a request that has ended."""
        self._offsets.pop(state, None)

    def chances(self, states: Sequence[RequestState] = ()) -> list[float]:
        """Return the mean chance of these requests' draft tokens, if those before are accepted. Called once a step."""
        self._rounded = _in_40ths(self.rates)
        known = self._offsets
        offset = sum([known.get(state, 0.0) for state in states]) / max(1, len(states))
        return [min(max(rate + offset, 0.0), _MOST) for rate in self.rates]

    def num_likely(self, state: RequestState) -> int:
        """Return how many draft tokens of a request are likely enough to be verified."""
        return self._likely(self._rounded, round(40 * self._offsets.get(state, 0.0)))


def _in_40ths(rates: Sequence[float]) -> tuple[int, ...]:
    return tuple([round(40 * rate) for rate in rates])


def _num_likely(rates: tuple[int, ...], offset: int) -> int:
    """The same for rates and an offset in 40ths."""
    all_right = 1.0
    for number, rate in enumerate(rates):
        all_right *= min(max((rate + offset) / 40, 0.0), 1.0)
        if all_right < _LEAST_LIKELY:
            return number
    return len(rates)
