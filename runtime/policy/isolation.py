"""Isolation of requests that kill the runners: one is found, and ended, by letting suspects run alone.

A loss of the runners (a crashed kernel, a killed process, a hung step) is a pause for all requests, which are then
recomputed (C8). One of them may be its cause, and would bring it back for ever:

    first loss     all requests go on together: most losses have another cause, or happen once
    second loss    requests that had rows in flight both times, and gained next to nothing between, are suspects. They
                   run one after another, each alone, until it has gained a few tokens: then it is cleared
    third loss     the one that ran alone is at fault, and ends (C9)

Which rows kill does not matter, nor whether steps finish between: a prompt may be computed each time, and the first
token after it fail. During a trial no other request runs, so a third loss has no other cause. A trial takes a few
steps, less than it takes to load a model again. A request that gains more between two losses is not suspected.

Several requests may kill the runners only together. Each is cleared alone, so a cleared request is not tried again:

    cleared        they return one after another, each when the one before has gained a few tokens beside the others
    lost again     just after a return: one fewer may run together from then on; the others wait until one ends. A
                   request that was lost so _MAX_RETURNS times in a row is at fault, and ends
                   at another time: half as many may run together

So each further loss makes the crowd smaller or brings a request closer to its end.
"""

from __future__ import annotations

from collections.abc import Iterable

from runtime.core.request_state import RequestState

MAX_LOSSES = 3  # in a row that a request takes part in before it ends, if the last one was its alone
_MAX_RETURNS = 3  # losses in a row just after a cleared request's return before it ends
PROGRESS_TOKENS = 4  # tokens without a loss that clear a request


class Isolation:
    """The suspects, which of them is on trial, and the return of cleared requests."""

    def __init__(self) -> None:
        self._goals: dict[RequestState, int] = {}  # suspects, and their number of tokens that clears them
        # Cleared requests, in the order of their return; the number of tokens that lets the next one return, 0 before.
        self._cleared: dict[RequestState, int] = {}
        self._most: int | None = None  # cleared requests that may run together; None: all

    def lost(self, in_flight: Iterable[RequestState]) -> RequestState | None:
        """The runners were lost with rows of these live requests in flight; returns the one at fault if it is known."""
        states = list(in_flight)
        for state in states:
            has_come_on = len(state.tokens) - state.lost_at >= PROGRESS_TOKENS
            state.num_losses = 1 if has_come_on else state.num_losses + 1
            state.lost_at = len(state.tokens)
            if state.num_losses >= MAX_LOSSES - 1 and state not in self._cleared:
                self._goals[state] = state.lost_at + PROGRESS_TOKENS
        # The last to arrive goes first: a request that has run for long was no danger until now.
        self._goals = dict(sorted(self._goals.items(), key=lambda item: item[0].sort_key[-1], reverse=True))
        if len(states) == 1 and states[0].num_losses >= MAX_LOSSES:
            return states[0]
        return self._lost_together([state for state in states if state in self._cleared])

    def _lost_together(self, cleared: list[RequestState]) -> RequestState | None:
        """These cleared requests were in flight; returns the one that has just returned, if it did so too often."""
        returned = [state for state in cleared if len(state.tokens) < self._cleared[state]]
        for state in cleared:
            state.num_returns_lost = state.num_returns_lost + 1 if state in returned else 0
        if len(cleared) > 1:
            self._most = len(cleared) - 1 if returned else len(cleared) // 2
        self._cleared = dict.fromkeys(sorted(self._cleared, key=_return_order), 0)
        return next((state for state in returned if state.num_returns_lost >= _MAX_RETURNS), None)

    def on_trial(self) -> RequestState | None:
        """The request that has to run alone now; None: there is no suspect."""
        while self._goals:
            state, goal = next(iter(self._goals.items()))
            if len(state.tokens) < goal:
                return state
            del self._goals[state]
            self._cleared[state] = 0
            self._cleared = {each: self._cleared[each] for each in sorted(self._cleared, key=_return_order)}
        return None

    def held(self) -> frozenset[RequestState]:
        """Cleared requests that must not get a slot now: all that wait but one, or all while another returns."""
        waiting = [state for state in self._cleared if state.slot is None]
        if not waiting:
            return frozenset()
        running = [state for state in self._cleared if state.slot is not None]
        is_returning = any(len(state.tokens) < self._cleared[state] for state in running)
        if is_returning or (self._most is not None and len(running) >= self._most):
            return frozenset(waiting)
        self._cleared[waiting[0]] = len(waiting[0].tokens) + PROGRESS_TOKENS
        return frozenset(waiting[1:])

    def forget(self, state: RequestState) -> None:
        """The request has ended."""
        self._goals.pop(state, None)
        self._cleared.pop(state, None)
        if not self._cleared:
            self._most = None


def _return_order(state: RequestState) -> tuple[int, int]:
    """The first to arrive returns first, before those that were lost as they returned."""
    return state.num_returns_lost, state.sort_key[-1]
