"""Isolation of requests that kill the runners: one is found, and ended, by letting suspects run alone.

A loss of the runners (a crashed kernel, a killed process, a hung step) is a pause for all requests, which are then
recomputed (C8). One of them may be its cause, and would bring it back for ever:

    first loss     everyone goes on together: most losses are nobody's fault, or happen once
    second loss    those that had rows in flight both times, and got next to nothing done between, are suspects. They
                   run one after another, each alone, until it has got a few tokens: then it is cleared
    third loss     the one that ran alone is at fault, and ends (C9)

It does not matter which rows kill, nor that steps finish between: a prompt may be computed each time, and the first
token after it fail. While trials last nobody else runs, so that a third loss is nobody else's doing; that is some steps
a suspect, less than it takes to load a model again. A request that comes further between two losses is not suspected.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.core.request_state import RequestState

MAX_LOSSES = 3  # in a row that a request takes part in before it ends, if the last one was its alone
_PROGRESS = 4  # tokens without a loss that clear a request


class Isolation:
    """The suspects, and who of them is on trial."""

    def __init__(self) -> None:
        self._goals: dict[RequestState, int] = {}  # suspects, and their number of tokens that clears them

    def lost(self, in_flight: Iterable[RequestState]) -> RequestState | None:
        """The runners were lost with rows of these live requests in flight; returns the one at fault if it is known."""
        states = list(in_flight)
        for state in states:
            has_come_on = len(state.tokens) - state.lost_at >= _PROGRESS
            state.num_losses = 1 if has_come_on else state.num_losses + 1
            state.lost_at = len(state.tokens)
            if state.num_losses >= MAX_LOSSES - 1:
                self._goals[state] = state.lost_at + _PROGRESS
        # The last to arrive goes first: who has run for long was no danger until now.
        self._goals = dict(sorted(self._goals.items(), key=lambda item: item[0].sort_key[-1], reverse=True))
        if len(states) == 1 and states[0].num_losses >= MAX_LOSSES:
            return states[0]
        return None

    def on_trial(self) -> RequestState | None:
        """The request that has to run alone now; None: there is no suspect."""
        while self._goals:
            state, goal = next(iter(self._goals.items()))
            if len(state.tokens) < goal:
                return state
            del self._goals[state]
        return None

    def forget(self, state: RequestState) -> None:
        """The request has ended."""
        self._goals.pop(state, None)
